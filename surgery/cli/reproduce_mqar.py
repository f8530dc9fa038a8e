"""``surgery reproduce mqar``: both papers' associative recall, trained from scratch."""

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


def mqar(
    task: Annotated[str, typer.Option(metavar="base|update|block", help="The variant of the task.")] = "base",
    rules: RulesOption = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="LIST", help="L, growing over the training, L/4 pairs. Default: 128 to 1024.")
    ] = None,
    rates: RatesOption = None,
    seeds: SeedsOption = None,
    steps: StepsOption = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens a step.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens: keys below, values above the middle.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the models.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of a layer.")] = None,
    key_dim: Annotated[int | None, typer.Option(help="Key width of a head.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="Value width of a head.")] = None,
    tested: Annotated[int | None, typer.Option(help="Sequences of a test.")] = None,
    quick: QuickOption = False,
    output: OutputOption = None,
    jobs: JobsOption = None,
    plot: PlotOption = None,
    device: DeviceOption = "auto",
    json: JsonOption = None,
) -> None:
    """Train two-layer models to recall, one for each memory rule, and test them at every length.

    Rules: additive (Mamba2), plain and palimpsa (Palimpsa-D without and with metaplasticity), delta (Gated DeltaNet),
    bayesian.

    [dim]Examples[/dim]
      surgery reproduce mqar --quick
      surgery reproduce mqar --output mqar --plot mqar.png
      surgery reproduce mqar --task update --rules delta,additive,bayesian --output update
    """
    from surgery.cli.lists import whole_list
    from surgery.cli.trained import chosen, run_experiment
    from surgery.experiments.mqar import QUICK, Mqar

    sizes = None if lengths is None else whole_list(lengths, "--lengths", "128,256")
    settings = chosen(
        quick, QUICK, rules=rules, rates=rates, seeds=seeds, task=task, lengths=sizes, steps=steps, tokens=tokens,
        vocabulary=vocabulary, width=width, heads=heads, key_dim=key_dim, value_dim=value_dim, tested=tested,
    )  # fmt: skip
    run_experiment(Mqar(**settings), quick=quick, output=output, jobs=jobs, plot=plot, device=device, json=json)
