"""The model card of an exported model: what was done, what was measured before and after, how to load it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import surgery
from surgery.operation import RECIPE_FILE, at_commit
from surgery.places import is_hub_id
from surgery.results import shown
from surgery.sizes import format_count

if TYPE_CHECKING:
    from surgery.export.source import Source
    from surgery.export.verify import Check


_WITH_PACKAGE = """\
```python
import surgery  # pip install model-surgery
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```"""
_WITH_CODE = """\
With torch and transformers alone; this runs the Python files that lie beside the weights:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

With the package, whose classes are then used and nothing beside the weights is run:

{package}

The files `surgery_*.py` are modules of model-surgery {version} (Apache-2.0) with their imports rewritten; together they
have the SHA-256 `{digest}`. `surgery verify {name}` holds them, the weights and a few logits against what was
exported."""


def model_card(
    source: Source,
    name: str,
    dtype: str,
    check: Check,
    report: dict[str, Any] | None,
    control: dict[str, Any] | None,
    code: str | None,
) -> str:
    """The README.md of an exported model.

    Args:
        name: of the output directory.
        report: an evaluation report of the model, with its base as baseline where that was measured.
        control: a report of the control.
        code: SHA-256 of the modelling code beside the weights, None where there is none.
    """
    base, swap = source.base, source.swap
    hub = f"base_model: {base}\n" if is_hub_id(base) else ""
    layers = ", ".join(map(str, sorted(swap["layers"])))
    parts = [
        f"---\n{hub}library_name: transformers\ntags: [model-surgery, {swap['rule']}]\n---",
        f"# {name}",
        f"`{base}`{at_commit(swap)} with the memory of layers {layers} {_swapped(swap['rule'])}.",
        _dose(source),
        "## Adaptation",
        _phases(source),
        "## Measured before and after",
        _measured(report, control, base),
        "## This checkpoint",
        _check(check, dtype),
        f"The recipe is in `{RECIPE_FILE}`, word for word.{_overrides(source)}" if source.recipe_text else "",
        "## Loading it",
        _loading(name, code),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _loading(name: str, code: str | None) -> str:
    package = _WITH_PACKAGE.format(name=name)
    if code is None:
        return package
    return _WITH_CODE.format(name=name, package=package, version=surgery.__version__, digest=code)


def dose_warning(source: Source) -> str | None:
    """What must be said of a model whose memories are not at their full rule, or None."""
    below = {layer: dose for layer, dose in source.doses.items() if dose < 1}
    if not below:
        return None
    low, high = min(below.values()), max(below.values())
    at = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return f"{len(below)} of {len(source.doses)} swapped layers are at dose {at}, below the full rule's 1"


def _swapped(rule: str) -> str:
    if rule == "host":
        return "kept as it is: the control, whose layers were trained with the host's own rule"
    return f"swapped for the rule `{rule}`"


def _dose(source: Source) -> str:
    if not source.doses:
        return ""
    warning = dose_warning(source)
    if warning is None:
        return "Every swapped layer is at dose 1, the full rule."
    listed = ", ".join(f"layer {layer}: {dose:g}" for layer, dose in source.doses.items())
    return (
        f"**Dose: {warning}.** Between the host's rule (dose 0) and the full rule (1), such a layer computes neither. "
        f"({listed})"
    )


def _phases(source: Source) -> str:
    phases = source.manifest.phases if source.manifest else []
    done = [phase for phase in phases if phase.status == "finished"]
    if not done:
        return "**None: this is the swap alone.** Nothing was trained after it."
    rows = ["| phase | kind | steps | tokens | loss, first to last | dose at the end |", "|---|---|---|---|---|---|"]
    for phase in done:
        figures = phase.figures
        losses = [figures.get(key) for key in ("first_loss", "last_loss")]
        loss = " to ".join(f"{value:.4f}" for value in losses) if None not in losses else ""
        dose = figures.get("dose")
        tokens = format_count(figures.get("tokens", phase.tokens))
        ends = "" if dose is None or not source.doses else f"{dose:g}"
        steps = figures.get("steps", phase.steps)
        rows.append(f"| {phase.name} | {phase.kind} | {steps} | {tokens} | {loss} | {ends} |")
    if source.unfinished:
        rows.append(f"\n**Not finished when this was exported:** {', '.join(source.unfinished)}.")
    return "\n".join(rows)


def _measured(report: dict[str, Any] | None, control: dict[str, Any] | None, base: str) -> str:
    if report is None:
        return "Not measured. Measure with `surgery eval DIR --baseline BASE`, or export again with `--evaluate`."
    columns = {"this model": report["model"]}
    if report["baseline"] is not None:
        columns = {f"before (`{base}`)": report["baseline"], **columns}
    if control is not None:
        columns["control"] = control["model"]
    rows = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for label, key, digits in (("perplexity", "perplexity", 3), ("bits per byte", "bits_per_byte", 4)):
        rows.append(f"| {label} | {' | '.join(shown(column[key], digits) for column in columns.values())} |")
    lengths = [row["length"] for row in (report["model"]["recall"] or {}).get("lengths", ())]
    for length in lengths:
        rows.append(f"| recall at {length} tokens | {' | '.join(_recall(c, length) for c in columns.values())} |")
    text = report["text"]
    notes = [f"On {text['name']}: {text['tokens']:,} tokens, {text['bytes']:,} bytes, read with the state carried on."]
    difference = report["difference"]
    if difference and difference["paired"]:
        ratio = difference["perplexity_ratio"]
        bounds = "" if ratio["low"] is None else f" (95%: {ratio['low']:.4f} to {shown(ratio['high'], 4)})"
        notes.append(f"Perplexity after over before: {shown(ratio['mean'], 4)}{bounds}.")
    if any(shown(column["perplexity"], 3) == "inf" for column in columns.values()):
        notes.append("A perplexity of inf is more than a float holds; bits per byte say how large the loss is.")
    if lengths:
        recall = report["model"]["recall"]
        count = recall["lengths"][0]["total"]
        notes.append(
            f"Recall is RULER-style: how often the right value of a needle is the most probable of "
            f"{recall['candidates']} ({count} prompts a length, Wilson's 95% interval, chance {recall['chance']:g})."
        )
    if control is not None:
        notes.append(_control(control, text))
    command = report.get("command")
    if command:
        notes.append(f"Measured with `{command}`.")
    return "\n".join(rows) + "\n\n" + "\n".join(notes)


def _control(control: dict[str, Any], text: dict[str, Any]) -> str:
    read = control["text"]
    same = all(read[key] == text[key] for key in ("name", "tokens", "bytes"))
    name = control["model"]["name"]
    if same:
        return f"The control is `{name}`, measured on the same text."
    return f"The control is `{name}`, measured on another text ({read['name']}, {read['tokens']:,} tokens)."


def _recall(entry: dict[str, Any], length: int) -> str:
    for row in (entry["recall"] or {}).get("lengths", ()):
        if row["length"] == length:
            low, high = row["interval"]
            return f"{row['fraction']:.2f} ({low:.2f} to {high:.2f})"
    return ""


def _check(check: Check, dtype: str) -> str:
    where = f"on {check.tokens} tokens of {check.text}"
    exact = (
        f"Stored in {dtype}; decays and the memories' own small parameters in float32. Loaded in a fresh process with "
        f"`AutoModelForCausalLM` as below, its logits equal the run's in {dtype} bit for bit, {where}."
    )
    if not check.cast:
        return exact
    return (
        f"{exact} The run itself is in {check.run_dtype}: against it the cast moves logits by up to "
        f"{check.max_logit_difference:.3g}, and the next-token distribution by {check.kl:.3g} nats a token (KL). "
        "What was measured above was measured before the cast unless it says otherwise."
    )


def _overrides(source: Source) -> str:
    changed = source.manifest.overrides if source.manifest else []
    return f" Changed on the command line: {', '.join(f'`{item}`' for item in changed)}." if changed else ""
