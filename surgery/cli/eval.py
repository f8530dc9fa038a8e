"""``surgery eval``: what a model does on a text and on tasks, beside a baseline and a control."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgery.cli.common import AllowPickleOption, DeviceOption, JsonOption, RevisionOption
from surgery.cli.inspect import MODEL_HELP, TEXT_HELP, count_option

if TYPE_CHECKING:
    from surgery.evaluation.tasks.measuring import TaskPlan


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="BASE", help="Another model, measured alike and compared.")
    ] = None,
    control: Annotated[
        str | None,
        typer.Option("--control", metavar="RUN", help="A third, trained as long without the operation; compared too."),
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
    tasks: Annotated[
        str,
        typer.Option(
            "--tasks", metavar="NAME,...|all|none", help="list_recall, list_update, single_1 and so on: see above."
        ),
    ] = "none",
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths", metavar="N,...", help="Tokens of the tasks' documents; own: a list without text around it."
        ),
    ] = None,
    pairs: Annotated[
        str | None, typer.Option("--pairs", metavar="N,...", help="Keys of the tasks' lists: 4,16,64.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", help="Documents for each task, length and pairs: 50.")
    ] = None,
    haystack: Annotated[
        str | None, typer.Option("--haystack", metavar="FILE", help="Text around needles and lists; default: --text's.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of needles and tasks.")] = 0,
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
    """Measure perplexity, bits per byte, loss by position, needle recall and retrieval tasks.

    The text is read once with the state carried on. Differences to a baseline or a control are paired token by token,
    those of tasks document by document, and come with 95% intervals. Of a run, its latest model is measured, and the
    report is kept in RUN/evaluation as well.

    Tasks: list_recall, list_update (keys and values, all asked again; a third given a second value); RULER-style
    single_1 to 3, multikey_1 to 3, multivalue, multiquery, variable_tracing, common_words, frequent_words.

    [dim]Examples[/dim]
      surgery eval bundled:tiny-mamba2
      surgery eval runs/demo-palimpsa --baseline bundled:tiny-mamba2 --plot eval.png
      surgery eval bundled:tiny-gdn --tasks list_recall --lengths own,1024 --pairs 4,16 --recall-lengths none
      surgery eval runs/mine --baseline owner/name --baseline-revision v1.0
      surgery eval ./my-model --text book.txt --tokens all --recall-lengths none --json -
    """
    from surgery.cli.common import check_revision, err, named, out, pick_device, write_json
    from surgery.cli.eval_tables import others, print_report
    from surgery.cli.progress import progress_bars
    from surgery.data.texts import load_text
    from surgery.errors import UsageError
    from surgery.evaluation.finite import overflow_note
    from surgery.evaluation.loading import locate
    from surgery.evaluation.plots import check_plot_path, plot_evaluation
    from surgery.evaluation.report import RecallPlan, evaluate

    limit = None if tokens == "all" else count_option("--tokens", tokens)
    window = None if context is None else count_option("--context", context)
    needles = [] if recall_lengths.strip().lower() == "none" else counts("--recall-lengths", recall_lengths)
    task_plan = plan_tasks(tasks, lengths, pairs, samples, seed)
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
    with named("--control"):
        third = None if control is None else locate(control)
    with named("--text"):
        read = load_text(text, "heldout", limit=None if limit is None else 16 * limit)
    longest = max([*needles, *(length or 0 for length in (task_plan.lengths if task_plan else []))], default=0)
    hay = None
    if haystack is not None and longest:
        with named("--haystack"):
            hay = load_text(haystack, limit=64 * longest + 2**20)
    recall = RecallPlan(needles, samples=recall_samples, seed=seed, haystack=hay) if needles else None
    if task_plan is not None:
        task_plan = replace(task_plan, haystack=hay)

    def say(line: str) -> None:
        err.print(line, style="dim", highlight=False, soft_wrap=True, markup=False)

    with progress_bars() as bars:
        report = evaluate(
            target,
            base,
            third,
            text=read,
            limit=limit,
            context=window,
            recall=recall,
            tasks=task_plan,
            device=where,
            progress=bars,
            say=say,
        )
    entries = {entry["name"]: entry for entry in (report["model"], *(entry for _, entry, _ in others(report)))}
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


def plan_tasks(tasks: str, lengths: str | None, pairs: str | None, samples: int | None, seed: int) -> TaskPlan | None:
    """Return what the options ask for, None where no task is.

    Raises:
        UsageError: naming the option that asks for nothing there is.
    """
    from surgery.cli.common import named
    from surgery.errors import UsageError
    from surgery.evaluation.tasks import chosen_tasks
    from surgery.evaluation.tasks.listing import MOST_PAIRS
    from surgery.evaluation.tasks.measuring import TaskPlan

    given = {"--lengths": lengths, "--pairs": pairs, "--samples": samples}
    if tasks.strip().lower() == "none":
        for option, value in given.items():
            if value is not None:
                raise UsageError(f"{option} {value}: there are no tasks; add --tasks NAME")
        return None
    with named("--tasks"):
        chosen = chosen_tasks([name.strip() for name in tasks.split(",")])
    lists = any(task.listing for task in chosen)
    if pairs is not None and not lists:
        raise UsageError(f"--pairs {pairs}: no list is asked for; add --tasks list_recall")
    asked = [part.strip() for part in (lengths or ("own,512,1024" if lists else "512,1024")).split(",")]
    own = [None] * asked.count("own")
    if len(own) > 1:
        raise UsageError(f"--lengths {lengths}: each length once")
    if own and not lists:
        raise UsageError(f"--lengths {lengths}: only lists have a length of their own; add --tasks list_recall")
    numbers = [part for part in asked if part != "own"]
    found = [*own, *(counts("--lengths", ",".join(numbers)) if numbers else [])]
    if samples is not None and samples < 1:
        raise UsageError(f"--samples {samples}: ask at least one document")
    sizes = counts("--pairs", pairs or "4,16,64")
    if sizes[0] < 2 or sizes[-1] > MOST_PAIRS:
        raise UsageError(f"--pairs {pairs}: lists have 2 to {MOST_PAIRS} pairs")
    return TaskPlan(chosen, found, sizes, **({} if samples is None else {"samples": samples}), seed=seed)


def counts(option: str, value: str) -> list[int]:
    """Several counts, in ascending order.

    Raises:
        UsageError: naming the option.
    """
    from surgery.errors import UsageError

    found = [count_option(option, item) for item in value.split(",")]
    if len(set(found)) < len(found):
        raise UsageError(f"{option} {value}: each {'length' if 'length' in option else 'number'} once")
    return sorted(found)


def register(app: typer.Typer) -> None:
    app.command("eval")(evaluate)
