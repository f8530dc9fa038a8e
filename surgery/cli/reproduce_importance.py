"""``surgery reproduce importance``: forgetting, importance and loss over a training."""

from __future__ import annotations

from typing import Annotated

import typer

from surgery.cli.common import DeviceOption, JsonOption
from surgery.cli.trained import JobsOption, OutputOption, PlotOption, QuickOption, RatesOption, SeedsOption, StepsOption


def importance(
    lengths: Annotated[
        str | None, typer.Option(metavar="LIST", help="L, growing over the training, L/4 pairs. Default: 128 to 1024.")
    ] = None,
    rates: RatesOption = None,
    seeds: SeedsOption = None,
    steps: StepsOption = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens a step.")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens: keys below, values above the middle.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the model.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of a layer.")] = None,
    key_dim: Annotated[int | None, typer.Option(help="Key width of a head.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="Value width of a head.")] = None,
    tested: Annotated[int | None, typer.Option(help="Sequences of a test.")] = None,
    records: Annotated[int | None, typer.Option(help="How often the figures are read.")] = None,
    quick: QuickOption = False,
    output: OutputOption = None,
    jobs: JobsOption = None,
    plot: PlotOption = None,
    device: DeviceOption = "auto",
    json: JsonOption = None,
) -> None:
    """Follow mean log N_t, the spread of importance and the loss of Palimpsa-D while it learns to recall.

    [dim]Examples[/dim]
      surgery reproduce importance --quick
      surgery reproduce importance --output importance --plot importance.png
    """
    from surgery.cli.lists import whole_list
    from surgery.cli.trained import chosen, run_experiment
    from surgery.experiments.importance import QUICK, Importance

    sizes = None if lengths is None else whole_list(lengths, "--lengths", "128,256")
    settings = chosen(
        quick, QUICK, rules=None, rates=rates, seeds=seeds, lengths=sizes, steps=steps, tokens=tokens,
        vocabulary=vocabulary, width=width, heads=heads, key_dim=key_dim, value_dim=value_dim, tested=tested,
        records=records,
    )  # fmt: skip
    run_experiment(Importance(**settings), quick=quick, output=output, jobs=jobs, plot=plot, device=device, json=json)
