"""``surgery export``: a run as an ordinary checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.common import DeviceOption, JsonOption, TrustOption


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run directory of surgery distill, or a directory of surgery apply.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="The directory to write; must be new or empty.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="float32|bfloat16|float16", help="Of the weights; default: the recipe's."),
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option("--shard-size", metavar="5GB", help="Of a weight file at most; default: the recipe's.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--evaluate", help="Measure the model and its base now, for the model card.")
    ] = False,
    control: Annotated[
        str | None,
        typer.Option("--control", metavar="RUN|JSON", help="A control's run or report, for the model card."),
    ] = None,
    code: Annotated[
        bool,
        typer.Option("--code/--no-code", help="Put the modelling code beside the weights, for trust_remote_code=True."),
    ] = True,
    json_target: JsonOption = None,
    device: DeviceOption = "auto",
    trust_remote_code: TrustOption = False,
) -> None:
    """Write a run's model as a Hugging Face checkpoint that AutoModelForCausalLM loads anywhere.

    Weights, configuration, tokenizer, generation settings, the recipe, a model card with the figures before and after,
    and the modelling code: transformers runs that under trust_remote_code=True where surgery is not imported. The
    directory appears once a fresh process has loaded it so and its logits equal the run's. surgery verify checks it
    later.

    [dim]Examples[/dim]
      surgery export runs/demo-palimpsa --output my-model
      surgery export runs/mine --output my-model --dtype bfloat16 --shard-size 2GB --control runs/control
      surgery export swapped --output my-model --evaluate
    """
    from rich.table import Table
    from rich.text import Text

    from surgery.cli.common import err, out, pick_device, write_json
    from surgery.cli.progress import progress_bars
    from surgery.errors import UsageError
    from surgery.sizes import format_bytes, parse_bytes

    if output is None:
        raise UsageError("--output is missing; name the directory to write")
    size = None
    if shard_size is not None:
        try:
            size = parse_bytes(shard_size)
        except ValueError as error:
            raise UsageError(f"--shard-size: {error}; write for example 5GB") from None
        if size < 1:
            raise UsageError(f"--shard-size {shard_size}: write for example 5GB")
    where = pick_device(device)
    from surgery.export.run import export as operate

    with progress_bars() as bars:
        done = operate(
            run,
            output,
            dtype=dtype,
            shard_size=size,
            measure=measure,
            control=control,
            device=where,
            code=code,
            stage=lambda text: err.print(text, style="dim", highlight=False, soft_wrap=True),
            progress=bars,
        )
    for warning in done.warnings:
        err.print(Text("warning:", style="yellow") + f" {warning}", highlight=False, soft_wrap=True)
    if write_json(done.as_dict(), json_target):
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    check = done.check
    layers = ", ".join(map(str, sorted(done.source.swap["layers"])))
    table.add_row("model", str(done.source.located.path))
    table.add_row("swapped", f"layers {layers} of {done.source.base}: {done.source.swap['rule']}")
    table.add_row("weights", f"{len(done.weights)} file(s), {format_bytes(done.num_bytes)}, {done.dtype}")
    table.add_row("reloaded", f"bit for bit the run's logits in {done.dtype}, {check.tokens} tokens, fresh process")
    if check.cast:
        moved = f"KL {check.kl:.3g} nats a token, logits by up to {check.max_logit_difference:.3g}"
        table.add_row("cast", f"from {check.run_dtype}: {moved}")
    if done.report is not None:
        from surgery.results import shown

        before, after = done.report["baseline"], done.report["model"]
        for label, key, digits in (("perplexity", "perplexity", 3), ("bits per byte", "bits_per_byte", 4)):
            start = f"{shown(before[key], digits)} before, " if before else ""
            table.add_row(label, f"{start}{shown(after[key], digits)} after")
    table.add_row("written", str(done.output))
    out.print(table)


def register(app: typer.Typer) -> None:
    app.command()(export)
