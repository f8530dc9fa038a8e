"""``surgery reproduce learned-collision`` and ``crowding``: models trained at given addresses."""

from __future__ import annotations

from typing import Annotated

import typer

from surgery.cli.common import DeviceOption, JsonOption
from surgery.cli.trained import (
    JobsOption,
    OutputOption,
    PlotOption,
    QuickOption,
    RatesOption,
    RulesOption,
    SeedsOption,
    StepsOption,
)

WidthOption = Annotated[int | None, typer.Option(help="Width of the models.")]
BatchOption = Annotated[int | None, typer.Option(help="Sequences a step.")]
TestedOption = Annotated[int | None, typer.Option(help="Sequences of a test.")]


def learned_collision(
    rules: RulesOption = None,
    rates: RatesOption = None,
    seeds: SeedsOption = None,
    steps: StepsOption = None,
    batch: BatchOption = None,
    pairs: Annotated[int | None, typer.Option(help="Keys and values of a sequence, A and B among them.")] = None,
    dim: Annotated[int | None, typer.Option(help="Key width D, at least --pairs.")] = None,
    width: WidthOption = None,
    trained_flood: Annotated[int | None, typer.Option(help="Most writes of A in training.")] = None,
    trained_overlaps: Annotated[
        str | None, typer.Option(metavar="LOW,HIGH", help="Overlaps of A and B in training. Default: 0.6,0.8.")
    ] = None,
    floods: Annotated[
        str | None, typer.Option(metavar="LIST", help="Writes of A in the tests. Default: 0 to 256.")
    ] = None,
    overlaps: Annotated[
        str | None, typer.Option(metavar="LIST", help="Overlaps of the tests. Default: 0.6 to 0.95.")
    ] = None,
    tested: TestedOption = None,
    quick: QuickOption = False,
    output: OutputOption = None,
    jobs: JobsOption = None,
    plot: PlotOption = None,
    device: DeviceOption = "auto",
    json: JsonOption = None,
) -> None:
    """Train on short floods of overlapping keys, test on long ones and on nearer keys.

    Rules: bayesian, reset (its covariance starts anew at every write), delta.

    [dim]Examples[/dim]
      surgery reproduce learned-collision --quick
      surgery reproduce learned-collision --output collision --plot collision.png
    """
    from surgery.cli.lists import number_list, whole_list
    from surgery.cli.trained import chosen, run_experiment
    from surgery.errors import UsageError
    from surgery.experiments.learned_collision import QUICK, LearnedCollision

    ends = None if trained_overlaps is None else number_list(trained_overlaps, "--trained-overlaps", "0.6,0.8")
    if ends is not None and len(ends) != 2:
        raise UsageError(f"--trained-overlaps {trained_overlaps}: write lowest and highest, for example 0.6,0.8")
    settings = chosen(
        quick, QUICK, rules=rules, rates=rates, seeds=seeds, steps=steps, batch=batch, pairs=pairs, dim=dim,
        width=width, trained_flood=trained_flood, trained_overlaps=ends, tested=tested,
        floods=None if floods is None else whole_list(floods, "--floods", "0,8,256"),
        overlaps=None if overlaps is None else number_list(overlaps, "--overlaps", "0.8,0.95"),
    )  # fmt: skip
    experiment = LearnedCollision(**settings)
    run_experiment(experiment, quick=quick, output=output, jobs=jobs, plot=plot, device=device, json=json)


def crowding(
    rules: RulesOption = None,
    rates: RatesOption = None,
    seeds: SeedsOption = None,
    steps: StepsOption = None,
    batch: BatchOption = None,
    dim: Annotated[int | None, typer.Option(help="Key width D.")] = None,
    values: Annotated[int | None, typer.Option(help="Values that a pair has to choose from.")] = None,
    width: WidthOption = None,
    trained: Annotated[int | None, typer.Option(help="Pairs for each dimension in training.")] = None,
    occupancies: Annotated[
        str | None, typer.Option(metavar="LIST", help="Pairs for each dimension in the tests. Default: 6,8,12,16.")
    ] = None,
    tested: TestedOption = None,
    quick: QuickOption = False,
    output: OutputOption = None,
    jobs: JobsOption = None,
    plot: PlotOption = None,
    device: DeviceOption = "auto",
    json: JsonOption = None,
) -> None:
    """Train on more random keys than dimensions, test on many more.

    Rules: bayesian, reset (its covariance starts anew at every write), delta.

    [dim]Examples[/dim]
      surgery reproduce crowding --quick
      surgery reproduce crowding --output crowding --plot crowding.png
    """
    from surgery.cli.lists import whole_list
    from surgery.cli.trained import chosen, run_experiment
    from surgery.experiments.crowding import QUICK, Crowding

    settings = chosen(
        quick, QUICK, rules=rules, rates=rates, seeds=seeds, steps=steps, batch=batch, dim=dim, values=values,
        width=width, trained=trained, tested=tested,
        occupancies=None if occupancies is None else whole_list(occupancies, "--occupancies", "6,8,12,16"),
    )  # fmt: skip
    run_experiment(Crowding(**settings), quick=quick, output=output, jobs=jobs, plot=plot, device=device, json=json)
