"""``surgery inspect``: which layers remember longest, and whether memory limits the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgery.cli.common import AllowPickleOption, DeviceOption, JsonOption, RevisionOption

if TYPE_CHECKING:
    from surgery.inspection.measure import Inspection

MODEL_HELP = "bundled:NAME, a checkpoint directory, a run directory (its latest model), or a hub id."
TEXT_HELP = "bundled (Python's documentation), a file or directory, or hub:NAME; ,column=FIELD names a field."
DEFAULT_TOP = 4
DIAGNOSTICS = {  # short names for the table
    "importance_spread": "spread", "covariance_condition": "cond P", "gain": "gain", "host_gain": "host's"
}  # fmt: skip
EXPLAINED = {
    "importance_spread": "r = (I max - I min) / I min",
    "covariance_condition": "condition number of the predicted covariance",
    "gain": "share of a read's error that the last writes remove at their keys; far below the host's, a layer hardly "
    "learns any more",
    "host_gain": "that of the host's rule",
}


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    text: Annotated[str | None, typer.Option("--text", metavar="FILE|bundled", help=TEXT_HELP)] = None,
    tokens: Annotated[str, typer.Option("--tokens", metavar="N", help="Read at most this many: 64k.")] = "64k",
    metric: Annotated[
        str,
        typer.Option(
            "--metric",
            metavar="mean|log-mean|median",
            help="Ranks the layers; default log-mean, the paper's only aggregate. A mean is moved by a few tokens.",
        ),
    ] = "log-mean",
    top: Annotated[int | None, typer.Option("--top", metavar="K", help="Mark the K first.")] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Estimate from A_log and dt_bias alone; no text is read.")
    ] = False,
    capacity: Annotated[
        bool,
        typer.Option(
            "--capacity",
            help="Instead of ranking layers, measure which lists the model recalls, by number of pairs and length, and "
            "say whether memory limits it; --tokens bounds what each of these reads.",
        ),
    ] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="PATH", help="Draw layers and heads: .png, .pdf or .svg.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", metavar="OUT.yaml", help="Write a recipe for the marked layers.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="palimpsa|bayesian", help="The recipe's memory rule.")
    ] = None,
    allow_pickle: AllowPickleOption = False,
    probe: Annotated[
        str | None,
        typer.Option(
            "--probe",
            metavar="RULE",
            help="Swap each layer alone for palimpsa or bayesian, in memory, and measure on the text's first 4096 "
            "tokens how far the model drifts at dose 1 and how its loss slopes at dose 0.",
        ),
    ] = None,
    offload: Annotated[
        bool | None,
        typer.Option(
            "--offload/--no-offload",
            help="Read each block from the disk when it runs, or load the whole model; default: what fits.",
        ),
    ] = None,
    revision: RevisionOption = None,
    json_target: JsonOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Rank a model's layers by their forgetting horizon N_t = 1/(1 - alpha_t).

    Streams text through the model and measures the decay alpha_t of every layer and head. On an upgraded model the
    state of each swapped layer is described too. With --probe, what a swap of each layer would cost and offer stands
    beside it: KL from the model as it is at dose 1, and d loss / d dose at dose 0, in nats a token.

    [dim]Examples[/dim]
      surgery inspect bundled:tiny-mamba2
      surgery inspect ./my-model --text book.txt --tokens 256k --metric median --plot layers.png
      surgery inspect ./my-model --static --json -
      surgery inspect bundled:tiny-gdn --top 4 --recipe mine.yaml --memory bayesian
      surgery inspect ./my-model --capacity
      surgery inspect bundled:tiny-mamba2 --probe palimpsa --tokens 4k
      surgery inspect ./larger-than-memory --offload --tokens 8k
    """
    from surgery.cli.common import check_revision, err, named, out, pick_device, write_json
    from surgery.cli.progress import progress_bars
    from surgery.data.sources import sources
    from surgery.errors import UsageError
    from surgery.evaluation.plots import check_plot_path
    from surgery.hosts import ADAPTERS
    from surgery.inspection.draft import DEFAULT_MEMORY, MEMORIES, check_recipe_path, draft_recipe, write_recipe
    from surgery.inspection.horizon import check_metric
    from surgery.inspection.measure import inspect_model, inspect_static
    from surgery.inspection.plots import plot_horizons

    check_metric(metric)
    check_revision("--revision", revision, model)
    limit = count_option("--tokens", tokens)
    if static and text is not None:
        raise UsageError("--static reads no text; leave out --text, or --static")
    if static and (probe is not None or offload is not None):
        raise UsageError(f"--static runs no model; leave out {'--probe' if probe else '--offload'}, or --static")
    if probe is not None and probe not in MEMORIES:
        raise UsageError(f"--probe {probe}: choose {' or '.join(MEMORIES)}")
    if memory is not None and recipe is None:
        raise UsageError("--memory is the recipe's; add --recipe OUT.yaml")
    if memory is not None and memory not in MEMORIES:
        raise UsageError(f"--memory {memory}: choose {' or '.join(MEMORIES)}")
    if capacity:
        ranking = {"--static": static, "--probe": probe, "--top": top, "--recipe": recipe}
        for option, value in ranking.items():
            if value not in (None, False):
                raise UsageError(f"--capacity ranks no layers; leave out {option}, or --capacity")
    if top is not None and top < 1:
        raise UsageError(f"--top {top}: mark at least one layer")
    if plot is not None:
        check_plot_path(plot)
    if recipe is not None:
        check_recipe_path(Path(recipe))
    if text is not None:
        with named("--text"):
            sources(text)
    where = pick_device(device)

    def say(line: str) -> None:
        err.print(line, style="dim", highlight=False, soft_wrap=True)

    if capacity:
        from surgery.cli.capacity import plot_capacity, print_capacity
        from surgery.evaluation.loading import locate
        from surgery.inspection.capacity import measure_capacity
        from surgery.inspection.measure import inspected_text

        haystack = inspected_text(text or "bundled", limit)
        with progress_bars() as bars:
            options = {"offload": offload, "say": say, "progress": partial(bars, "lists")}
            measured = measure_capacity(locate(model, revision), haystack, limit, where, **options).as_dict()
        if not write_json(measured, json_target):
            print_capacity(out, measured)
        if plot is not None:
            plot_capacity(measured, plot)
            say(f"picture: {plot}")
        return
    if static:
        found = inspect_static(model, revision)
    else:
        with progress_bars() as bars:
            found = inspect_model(
                model,
                text or "bundled",
                limit,
                where,
                revision=revision,
                progress=partial(bars, "tokens"),
                offload=offload,
                say=say,
                probe=probe,
                probe_progress=partial(bars, f"layers with {probe}"),
            )
    layers = len(found.figures)
    if top is not None and top > layers:
        raise UsageError(f"--top {top}: the model has only {layers} layers with such a mixer")
    top = min(DEFAULT_TOP, layers) if top is None else top
    result = found.as_dict(metric, top)
    if not write_json(result, json_target):
        _print(out, found, metric, result)
    if plot is not None:
        how = "estimated from A_log and dt_bias" if found.static else f"on {found.tokens:,} tokens of {found.text}"
        title = f"{model}: forgetting horizon N_t {how}"
        plot_horizons(found.figures, metric, result["chosen"], title, plot, found.probe)
        err.print(f"picture: {plot}", style="dim", highlight=False, soft_wrap=True)
    if recipe is not None:
        rule = memory or DEFAULT_MEMORY[next(host.style for host in ADAPTERS if host.name == found.host)]
        write_recipe(Path(recipe), draft_recipe(found, metric, top, rule, text or "bundled"))
        err.print(f"recipe: {recipe}; next: surgery validate {recipe}", style="dim", highlight=False, soft_wrap=True)


def count_option(option: str, value: str) -> int:
    """A count as people write it: 64k.

    Raises:
        UsageError: naming the option.
    """
    from surgery.errors import UsageError
    from surgery.sizes import parse_count

    try:
        number = parse_count(value)
    except ValueError as error:
        raise UsageError(f"{option}: {error}; write for example 64k") from None
    if number < 1:
        raise UsageError(f"{option}: {value} is less than 1; write for example 64k")
    return number


def _print(out: Any, found: Inspection, metric: str, result: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from surgery.cli.common import bold
    from surgery.inspection.horizon import ranked

    how = (
        Text("static estimate", style="yellow") + " from A_log and dt_bias, without data"
        if found.static
        else Text(f"measured on {found.tokens:,} tokens of {found.text}")
    )
    out.print(bold(found.model) + f" ({found.host}): N_t in tokens, " + how, highlight=False, soft_wrap=True)
    chosen = set(result["chosen"])
    extra = sorted({name for figure in found.figures for name in figure.diagnostics or {}})
    table = Table(box=None, pad_edge=False, header_style="bold")
    capped = any(figure.capped for figure in found.figures)
    upgraded = any(figure.rule != "host" for figure in found.figures)
    probed = {one.layer: one for one in found.probe.layers} if found.probe else {}
    titles = ["layer", "mean", "log-mean", "median", "p10", "p90"]
    with_heads = not probed and not extra  # more does not fit into 80 columns
    titles += ["heads"] * with_heads
    titles += ["capped"] * capped + ["memory"] * upgraded + [DIAGNOSTICS.get(name, name) for name in extra]
    titles += ["KL", "slope"] if probed else []
    for title in titles:
        marked = title == metric
        table.add_column(Text(title, style="underline") if marked else title, justify="right", no_wrap=True)
    for figure in ranked(found.figures, metric):
        values = (figure.mean, figure.log_mean, figure.median, figure.p10, figure.p90)
        heads = [f"{min(figure.heads):,.0f}-{max(figure.heads):,.0f}"] * with_heads
        described = [_middle((figure.diagnostics or {}).get(name)) for name in extra]
        mark = figure.layer in chosen
        share = [f"{figure.capped:.1%}"] * capped
        rule = ["" if figure.rule == "host" else figure.rule] * upgraded
        layer = f"● {figure.layer:>3}" if mark else f"{figure.layer}"
        one = probed.get(figure.layer)
        tried = [f"{one.kl:.3g}", f"{one.slope:+.3g}"] if one else ["", ""] * bool(probed)
        row = (layer, *map(_number, values), *heads, *share, *rule, *described, *tried)
        table.add_row(*row, style="bold" if mark else None)
    out.print(table)
    out.print(f"● the {len(chosen)} of highest {metric}: {', '.join(map(str, result['chosen']))}", highlight=False)
    for line in _agreement(found, metric, result):
        out.print(line, style="dim", highlight=False)
    notes = ["heads: least and most of a head's mean"] * with_heads
    notes += [f"{DIAGNOSTICS.get(n, n)}: {EXPLAINED.get(n, n)}, median of heads" for n in extra]
    if notes:
        out.print("; ".join(notes), style="dim", highlight=False)
    if found.probe:
        out.print(
            f"KL at dose 1, slope of the loss at dose 0: nats a token, the layer alone swapped for {found.probe.rule}; "
            f"{found.probe.tokens:,} tokens in windows of {found.probe.context}, loss {found.probe.loss:.4f}",
            style="dim",
            highlight=False,
        )


def _agreement(found: Inspection, metric: str, result: dict[str, Any]) -> list[str]:
    """Whether the other metrics, and the quarters of the text by themselves, choose the same layers."""
    lines = []
    others = {name: layers for name, layers in result["choices"].items() if layers != result["chosen"]}
    if others:
        lines.append("; ".join(f"{name} would choose {', '.join(map(str, ls))}" for name, ls in others.items()))
    if (stability := result["stability"]) is not None:
        counts, pieces = stability["layers"], stability["pieces"]
        if counts == dict.fromkeys(result["chosen"], pieces):
            lines.append(f"each quarter of the text by itself chooses the same by {metric}")
        elif counts:
            shown = ", ".join(f"{layer} in {count}" for layer, count in counts.items())
            lines.append(f"of the {pieces} quarters of the text, each by itself, {metric} chooses {shown}")
    return lines


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _middle(values: list[float] | None) -> str:
    """Median over heads."""
    return f"{sorted(values)[len(values) // 2]:.3g}" if values else ""


def register(app: typer.Typer) -> None:
    app.command()(inspect)
