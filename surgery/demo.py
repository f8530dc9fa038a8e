"""The main job on a bundled base, from inspect to generated text, as the commands that a user would type.

    surgery demo --output demo-output

Runs in one process, so that only the last step, which shows that the exported model loads elsewhere, starts Python
again. Everything it reports is read from the files that the commands wrote.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surgery.checkpoint.staging import write_atomic
from surgery.errors import JobError
from surgery.evaluation.plots import new_figure, plot_evaluation, save_figure

GENERATE = """\
import sys
import surgery  # makes the Auto classes know the exported model's type
from transformers import AutoModelForCausalLM, AutoTokenizer
directory, prompt, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
inputs = tokenizer(prompt, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=length, do_sample=False)[0], skip_special_tokens=True))
"""
PROMPT = "The following are the built-in functions"


# what the steps leave in the output directory
FILES = ("inspect.json", "horizons.png", "apply.json", "applied", "run", "control", "exported", "control.json")


def commands(recipe: str, base: str, output: Path) -> list[tuple[str, list[str]]]:
    """The demo's steps: what each is for, and its command line after ``surgery``."""
    from surgery.adaptation.measuring import SAMPLES, TOKENS  # as distill measures, so that the table compares alike

    quoted = {name: shlex.quote(str(output / name)) for name in FILES}
    steps = (
        (
            "Which layers forget slowest?",
            f"inspect {base} --tokens 16k --top 4 --plot {quoted['horizons.png']} --json {quoted['inspect.json']}",
        ),
        (
            "Swap their memory, and see that the model still computes what it did",
            f"apply {recipe} --output {quoted['applied']} --json {quoted['apply.json']}",
        ),
        (
            "Adapt the swapped layers; the base is measured before and the result after",
            f"distill {recipe} --run {quoted['run']} --from {quoted['applied']}",
        ),
        (
            "The control: the same layers, tokens and data, next-token loss, the host's own memory",
            f"distill {recipe}-control --run {quoted['control']} --no-evaluation",
        ),
        (
            "Measure the control as the other two were measured",
            f"eval {quoted['control']} --tokens {TOKENS} --recall-samples {SAMPLES} --json {quoted['control.json']}",
        ),
        (
            "Export an ordinary checkpoint, checked by loading it in a fresh process",
            f"export {quoted['run']} --output {quoted['exported']}",
        ),
    )
    return [(title, shlex.split(words)) for title, words in steps]


def run(
    recipe: str,
    base: str,
    output: Path,
    *,
    invoke: Callable[[list[str]], None],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run every step and gather what they measured.

    Args:
        invoke: runs one command line of the tool; say: announces a step.

    Returns:
        ``summary``'s dictionary, with the generated text.

    Raises:
        UserError: whatever a step raises. JobError: the exported model did not load in a fresh process.
    """
    for title, words in commands(recipe, base, output):
        say(f"\n{title}\n$ surgery {shlex.join(words)}")
        invoke(words)
    say("\nGenerate with the exported model in a fresh process")
    text = generate(output / "exported", PROMPT, 40)
    result = summary(output) | {"prompt": PROMPT, "generated": text}
    draw(result, output / "summary.png")
    plot_evaluation(_read(output / "run" / "evaluation" / "after.json"), output / "eval.png")
    write_atomic(output / "summary.json", json.dumps(result, indent=2) + "\n")
    return result


def generate(directory: Path, prompt: str, length: int) -> str:
    """Greedy text from the checkpoint in ``directory``, loaded by transformers' Auto classes in a new Python.

    Raises:
        JobError: that Python failed; its last line is the message.
    """
    command = [sys.executable, "-c", GENERATE, str(directory), prompt, str(length)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise JobError(f"{directory}: the exported model does not load in a fresh process\n  {last}")
    return result.stdout.strip()


def summary(output: Path) -> dict[str, Any]:
    """What the steps wrote: layers, drift, losses, and the three models' figures."""
    after = _read(output / "run" / "evaluation" / "after.json")
    control = _read(output / "control.json")
    return {
        "inspection": _read(output / "inspect.json"),
        "drift": _read(output / "apply.json")["drift"],
        "losses": {
            phase.parent.name: _metrics(phase) for phase in sorted((output / "run").glob("phases/*/metrics.jsonl"))
        },
        "models": {"base": after["baseline"], "upgraded": after["model"], "control": control["model"]},
    }


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _metrics(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [{key: row[key] for key in ("step", "tokens", "loss", "dose")} for row in map(json.loads, lines)]


def draw(result: dict[str, Any], path: Path) -> None:
    """One picture: each phase's loss with the dose, bits per byte of the three models, recall by length."""
    losses, models = result["losses"], result["models"]
    figure = new_figure(4.2 * (len(losses) + 1), 7)
    top, bottom = figure.subfigures(2, 1)
    for axes, (name, rows) in zip(_row(top, len(losses)), losses.items(), strict=True):
        steps = [row["step"] for row in rows]
        axes.plot(steps, [row["loss"] for row in rows], color="tab:blue")
        axes.set(title=f"phase {name}", xlabel="step", ylabel="loss")
        dose = axes.twinx()
        dose.plot(steps, [row["dose"] for row in rows], color="tab:orange", linestyle="--")
        dose.set(ylim=(-0.05, 1.05), ylabel="dose")
    bits, recall = _row(bottom, 2)
    names = list(models)
    values = [models[name]["bits_per_byte"] for name in names]
    colours = dict(zip(names, ("tab:gray", "tab:blue", "tab:green"), strict=True))
    bars = bits.bar(names, values, color=list(colours.values()))
    bits.bar_label(bars, fmt="%.3f")
    margin = max(max(values) - min(values), 0.01)
    bits.set(title="held-out text", ylabel="bits per byte", ylim=(min(values) - margin, max(values) + margin))
    for name in names:
        if models[name].get("recall"):
            rows = models[name]["recall"]["lengths"]
            recall.plot(
                [row["length"] for row in rows],
                [row["fraction"] for row in rows],
                marker="o",
                label=name,
                color=colours[name],
            )
    recall.set(title="needle recall among ten", xlabel="tokens before the question", ylim=(0, 1.02))
    recall.set_xscale("log", base=2)
    recall.axhline(0.1, color="gray", linestyle=":", label="chance")
    recall.legend()
    save_figure(figure, path)


def _row(figure: Any, count: int) -> list[Any]:
    return list(figure.subplots(1, count, squeeze=False)[0])
