"""``surgery eval``: what a model does on a text, beside a baseline."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.cli.common import AllowPickleOption, DeviceOption, JsonOption, RevisionOption
from surgery.cli.inspect import MODEL_HELP, TEXT_HELP, count_option


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="BASE", help="Another model, measured alike and compared.")
    ] = None,
    text: Annotated[str, typer.Option("--text", metavar="FILE|bundled", help=TEXT_HELP)] = "bundled",
    tokens: Annotated[str, typer.Option("--tokens", metavar="N|all", help="Read at most this many.")] = "64k",
    context: Annotated[
        str | None, typer.Option("--context", metavar="N", help="Window for the loss by position; default: up to 2048.")
    ] = None,
    recall_lengths: Annotated[
        str, typer.Option("--recall-lengths", metavar="N,N,...|none", help="Tokens of the needle prompts.")
    ] = "256,512,1024",
    recall_samples: Annotated[
        int, typer.Option("--recall-samples", metavar="N", help="Needles for each length and depth.")
    ] = 20,
    haystack: Annotated[
        str | None, typer.Option("--haystack", metavar="FILE", help="Text around the needles; default: --text's.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the needles.")] = 0,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="PATH", help="Draw the result: .png, .pdf or .svg.")
    ] = None,
    revision: RevisionOption = None,
    baseline_revision: Annotated[
        str | None, typer.Option("--baseline-revision", metavar="REV", help="The same of --baseline.")
    ] = None,
    allow_pickle: AllowPickleOption = False,
    json_target: JsonOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Measure perplexity, bits per byte, loss by position and needle recall.

    The text is read once with the state carried on. With a baseline, differences are paired token by token and come
    with 95% intervals. Of a run, its latest model is measured, and the report is kept in RUN/evaluation as well.

    [dim]Examples[/dim]
      surgery eval bundled:tiny-mamba2
      surgery eval runs/demo-palimpsa --baseline bundled:tiny-mamba2 --plot eval.png
      surgery eval runs/mine --baseline owner/name --baseline-revision v1.0
      surgery eval ./my-model --text book.txt --tokens all --recall-lengths none --json -
    """
    from surgery.cli.common import check_revision, err, named, out, pick_device, write_json
    from surgery.cli.progress import progress_bars
    from surgery.data.texts import load_text
    from surgery.errors import UsageError
    from surgery.evaluation.finite import overflow_note
    from surgery.evaluation.loading import locate
    from surgery.evaluation.plots import check_plot_path, plot_evaluation
    from surgery.evaluation.report import RecallPlan, evaluate

    limit = None if tokens == "all" else count_option("--tokens", tokens)
    window = None if context is None else count_option("--context", context)
    lengths = _lengths(recall_lengths)
    if recall_samples < 1:
        raise UsageError(f"--recall-samples {recall_samples}: ask at least one needle")
    if plot is not None:
        check_plot_path(plot)
    check_revision("--revision", revision, model)
    if baseline is None and baseline_revision is not None:
        raise UsageError(f"--baseline-revision {baseline_revision}: there is no baseline; add --baseline BASE")
    if baseline is not None:
        check_revision("--baseline-revision", baseline_revision, baseline)
    where = pick_device(device)
    target = locate(model, revision)
    with named("--baseline"):
        base = None if baseline is None else locate(baseline, baseline_revision)
    with named("--text"):
        read = load_text(text, "heldout", limit=None if limit is None else 16 * limit)
    recall = None
    if lengths:
        with named("--haystack"):
            hay = load_text(haystack, limit=64 * max(lengths) + 2**20) if haystack is not None else None
        recall = RecallPlan(lengths, samples=recall_samples, seed=seed, haystack=hay)

    def say(line: str) -> None:
        err.print(line, style="dim", highlight=False, soft_wrap=True, markup=False)

    with progress_bars() as bars:
        report = evaluate(
            target, base, text=read, limit=limit, context=window, recall=recall, device=where, progress=bars, say=say
        )
    entries = {entry["name"]: entry for entry in (report["model"], report["baseline"]) if entry}
    figures = [{name: entry[key] for name, entry in entries.items()} for key in ("perplexity", "nll")]
    over = overflow_note(*figures, target.path)
    if over is not None:
        say(over)
    report["command"] = "surgery " + shlex.join(sys.argv[1:])
    if target.run is not None:
        report["checkpoint"] = str(target.path.relative_to(target.run))
    if not write_json(report, json_target):
        print_report(out, report)
    if target.run is not None:
        kept = keep_report(report, target.run, target.path)
        err.print(f"report: {kept}", style="dim", highlight=False, soft_wrap=True)
    if plot is not None:
        plot_evaluation(report, plot)
        err.print(f"picture: {plot}", style="dim", highlight=False, soft_wrap=True)


def keep_report(report: dict[str, Any], run: Path, model: Path) -> Path:
    """Write the report to RUN/evaluation, named after the phase whose model was measured."""
    from surgery.checkpoint.staging import write_atomic
    from surgery.results import json_text

    folder = run / "evaluation"
    folder.mkdir(exist_ok=True)
    name = model.name if model.name != "model" else model.parent.name
    path = folder / f"{name}.json"
    write_atomic(path, json_text(report) + "\n")
    return path


def print_report(out: Any, report: dict[str, Any]) -> None:
    """The report as tables."""
    from rich.table import Table

    from surgery.cli.common import bold

    entries = [entry for entry in (report["model"], report["baseline"]) if entry is not None]
    difference = report["difference"] or {}
    text = report["text"]
    out.print(
        bold(text["name"]) + f": {text['tokens']:,} tokens, {text['bytes']:,} bytes, state carried on",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for entry in entries:
        table.add_column(entry["name"], justify="right", overflow="fold")
    if difference:
        table.add_column("difference", justify="right", no_wrap=True)
    rows = [
        ("perplexity", "perplexity", 3, _times(difference.get("perplexity_ratio"))),
        ("bits per byte", "bits_per_byte", 4, f"{difference['bits_per_byte']:+.4f}" if difference else ""),
        ("nats per token", "nll", 4, _interval(difference.get("nll"), 4)),
    ]
    for label, key, digits, compared in rows:
        table.add_row(label, *(f"{entry[key]:,.{digits}f}" for entry in entries), *[compared] * bool(difference))
    by_start = {bucket["from"]: bucket for bucket in difference.get("positions", ())}
    for index, bucket in enumerate(report["model"]["positions"]):
        label = f"  at {bucket['from']}-{bucket['to'] - 1}"
        values = (f"{entry['positions'][index]['mean']:.4f}" for entry in entries)
        table.add_row(label, *values, *[_interval(by_start.get(bucket["from"]), 4)] * bool(difference), style="dim")
    recalls = [entry["recall"] for entry in entries]
    if all(recalls):
        found = recalls[0]
        table.add_row("recall")
        for index, row in enumerate(found["lengths"]):
            table.add_row(f"  {row['length']} tokens", *(_share(recall["lengths"][index]) for recall in recalls))
    out.print(table)
    notes = [f"nats at positions of separate windows of {report['context']} tokens; intervals are 95%"]
    if all(recalls):
        asked = f"{found['lengths'][0]['total']} prompts a length, haystack {found['haystack']}"
        notes.append(f"recall (RULER-style): the right value first of {found['candidates']}; {asked}")
    begin = text.get("begin_token")
    notes.append(f"every text and prompt begins with {begin}" if begin else "no token is put before a text or a prompt")
    notes += [f"{entry['name']}: commit {entry['revision']}" for entry in entries if entry.get("revision")]
    for note in notes:
        out.print(note, style="dim", highlight=False)
    if difference and not difference["paired"]:
        out.print("the two read different tokens: only bits per byte compare", style="dim")


def _lengths(value: str) -> list[int]:
    from surgery.errors import UsageError

    if value.strip().lower() == "none":
        return []
    lengths = [count_option("--recall-lengths", item) for item in value.split(",")]
    if len(set(lengths)) < len(lengths):
        raise UsageError(f"--recall-lengths {value}: each length once")
    return sorted(lengths)


def _interval(value: dict[str, Any] | None, digits: int) -> str:
    if value is None:
        return ""
    if value["low"] is None:
        return f"{value['mean']:+.{digits}f}"
    return f"{value['mean']:+.{digits}f} ± {(value['high'] - value['low']) / 2:.{digits}f}"


def _times(value: dict[str, Any] | None) -> str:
    if value is None:
        return ""
    if value["low"] is None:
        return f"x {value['mean']:.4f}"
    return f"x {value['mean']:.4f} ({value['low']:.4f}-{value['high']:.4f})"


def _share(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    return f"{row['fraction']:.2f} ({low:.2f}-{high:.2f})"


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
