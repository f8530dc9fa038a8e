"""How the bundled bases were made, step by step:

    python -m surgery.pretraining tokenizer --corpus DIR --output DIR
    python -m surgery.pretraining tokens    --corpus DIR --tokenizer DIR --output FILE.npy --tokens 300M
    python -m surgery.pretraining train     --base tiny-mamba2 --stream FILE.npy --tokenizer DIR --output DIR

and bases that can recall, several at once, from another stream:

    python -m surgery.pretraining rows      --corpus DIR --tokenizer DIR --output FILE.npy --tokens 500M
    python -m surgery.pretraining train     --base recall-gdn recall-gdn-bayesian --stream FILE.npy \\
                                            --tokenizer DIR --output DIR --text FILE

``DIR`` of the corpus holds books-<number>.txt.xz, books separated by a line with U+001E. ``train`` runs on a GPU in
minutes; with ``--text FILE`` it measures the exported model on a text that was not trained on.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from surgery.errors import JobError, UserError


def count(text: str) -> int:
    """A number of tokens, with K, M or B."""
    scale = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper())
    return int(float(text[:-1]) * scale) if scale else int(text)


def make_tokenizer(options: argparse.Namespace) -> None:
    from surgery.pretraining.data import tokenizer_sample
    from surgery.pretraining.tokenizer import save_tokenizer, train_tokenizer

    save_tokenizer(train_tokenizer(tokenizer_sample(options.corpus, options.seed)), options.output)


def make_tokens(options: argparse.Namespace) -> None:
    import numpy as np

    from surgery.pretraining.data import SHARES, mix, tokenise

    started = time.monotonic()
    wanted = int(options.tokens * SHARES["recall"])
    documents = tokenise(options.corpus, options.tokenizer, wanted, options.seed, options.workers)
    sizes = {name: sum(map(len, arrays)) for name, arrays in documents.items()}
    print(f"tokens at hand: {sizes} after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    np.save(options.output, mix(documents, options.tokens, options.seed))
    print(f"mixed after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def make_rows(options: argparse.Namespace) -> None:
    from surgery.pretraining.rows import Plan, write_rows

    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:.0f} s: {line}", file=sys.stderr, flush=True)

    plan = Plan(options.tokens, options.context, options.batch, seed=options.seed)
    write_rows(options.corpus, options.tokenizer, options.output, plan, options.workers, say)


def run_training(options: argparse.Namespace) -> None:
    from surgery.pretraining.report import say, write_report
    from surgery.pretraining.train import Settings, Training, device_data, run

    started = time.monotonic()
    chosen = {name: value for name in Settings.__dataclass_fields__ if (value := getattr(options, name)) is not None}
    stream, settings = open_stream(options.stream, chosen)
    data = device_data(stream, settings.batch, options.device)
    memory = memory_options(options.memory, options.base)
    trainings = []
    for name in options.base:
        checkpoint, start = options.checkpoint, options.start
        if len(options.base) > 1:
            checkpoint, start = checkpoint and checkpoint / f"{name}.pt", start and start / name
        trainings.append(
            Training(name, data, settings, options.device, documents=stream.ndim == 2, memory=memory,
                     checkpoint=checkpoint, start=start, compiled=False if options.no_compile else None)
        )  # fmt: skip
    say(f"{len(trainings)} trainings are ready after {time.monotonic() - started:.0f} s")
    finished = run(
        trainings, until=started + 60 * options.minutes if options.minutes else None, fit=bool(options.fit)
    )
    for training in trainings:
        training.release()
        output = options.output / training.name if len(options.base) > 1 else options.output
        output.mkdir(parents=True, exist_ok=True)
        write_report(training.report(), output / "training.json")
        if not training.failed:
            finish(training, options, output, finished)
    say(f"all done after {time.monotonic() - started:.0f} s")
    if failed := [f"{training.name}: {training.failed}" for training in trainings if training.failed]:
        raise JobError("; ".join(failed))


def memory_options(given: Sequence[str], names: Sequence[str]) -> dict:
    """``key=value`` of the command line as options of the memories in the bases ``names``.

    Raises:
        UsageError: another form, or an option that none of the memories has.
    """
    import yaml

    from surgery.errors import UsageError
    from surgery.memory import RULES
    from surgery.pretraining.bases import parts_of

    known = sorted({option for name in names if (rule := parts_of(name)[1]) for option in RULES[rule].defaults})
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or key not in known:
            keys = ", ".join(known) or "none for these bases"
            raise UsageError(f"--memory {text}: write key=value, key one of {keys}")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"--memory {text}: the value cannot be read; write it as in a recipe") from None
    return found


def open_stream(path: Path, chosen: dict):
    """A stream of tokens, and the settings ``chosen`` for it: rows of documents fix their own context and batch.

    Raises:
        UsageError: the file is neither, or another context or batch is chosen.
    """
    import numpy as np

    from surgery.errors import UsageError
    from surgery.pretraining.rows import read_rows
    from surgery.pretraining.train import Settings

    stream = np.load(path, mmap_mode="r")
    if stream.ndim == 1:
        return stream, Settings(**chosen)
    stream, plan = read_rows(path)
    fixed = {"context": plan.context, "batch": plan.batch}
    for name, value in fixed.items():
        if chosen.get(name, value) != value:
            raise UsageError(f"--{name} {chosen[name]}: {path.name} was written for {value}; leave it out")
    return stream, Settings(**{"tokens": plan.tokens, **chosen, **fixed})


def finish(training, options: argparse.Namespace, output: Path, finished: bool) -> None:
    """Export a training's model as far as it is, and measure it on ``--text`` when it is asked for and finished."""
    import torch
    from transformers import AutoTokenizer

    from surgery.data.texts import load_text
    from surgery.pretraining.bases import BASES
    from surgery.pretraining.evaluate import evaluate, evaluate_recall
    from surgery.pretraining.export import LARGEST, export_base, round_to_stored
    from surgery.pretraining.report import say, write_report
    from surgery.pretraining.tokenizer import load_tokenizer

    name, model, bundled = training.name, training.model, training.name in BASES
    if not options.no_export:
        round_to_stored(model)
        size = export_base(model, training.config, options.tokenizer, output, LARGEST if bundled else None)
        say(f"{name}: {size} bytes of weights in {output}")
    if not options.text or not (finished or options.measure):
        return
    torch.set_float32_matmul_precision("highest")
    text = load_text(options.text)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    model.eval()
    if bundled:
        result = evaluate(model, tokenizer, text.text, name=text.name)
    else:
        result = evaluate_recall(model, tokenizer, load_tokenizer(options.tokenizer), text.text, name=text.name)
    write_report(result, output / "evaluation.json")
    if bundled and not options.no_export:
        write_card(name, output)
    say(f"{name}: {result['bars']}")


def write_card(name: str, directory: Path) -> None:
    """README.md of a trained and measured base, from the reports beside it."""
    import json

    from safetensors import safe_open

    from surgery.pretraining.bases import base_config
    from surgery.pretraining.card import model_card

    weights = directory / "model.safetensors"
    with safe_open(weights, "pt") as tensors:
        parameters = sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    training, measured = (
        json.loads((directory / f"{report}.json").read_text(encoding="utf-8")) for report in ("training", "evaluation")
    )
    card = model_card(name, base_config(name), weights.stat().st_size, parameters, training, measured)
    (directory / "README.md").write_text(card, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    from surgery.pretraining.rows import Plan
    from surgery.pretraining.train import Settings

    parser = argparse.ArgumentParser(
        prog="python -m surgery.pretraining", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    tokenizer = commands.add_parser("tokenizer", help="train the tokenizer")
    tokenizer.set_defaults(run=make_tokenizer)
    tokens = commands.add_parser("tokens", help="tokenise, generate recall documents, mix and shuffle")
    tokens.set_defaults(run=make_tokens)
    rows = commands.add_parser("rows", help="tokenise and write the rows that recall bases are trained on")
    rows.set_defaults(run=make_rows)
    rows.add_argument("--context", type=int, default=Plan.context, help=f"tokens of a window; default {Plan.context}")
    rows.add_argument("--batch", type=int, default=Plan.batch, help=f"rows; default {Plan.batch}")
    for command, tokens_by_default in ((tokens, Settings.tokens), (rows, Plan.tokens)):
        command.add_argument("--tokens", type=count, default=tokens_by_default, help="for example 300M")
        command.add_argument("--workers", type=int)
    for command in (tokenizer, tokens, rows):
        command.add_argument("--corpus", type=Path, required=True)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--output", type=Path, required=True)

    training = commands.add_parser("train", help="train a base, export it and measure it")
    training.set_defaults(run=run_training)
    training.add_argument("--base", required=True, nargs="+", metavar="NAME", help="one, or several at once on a GPU")
    training.add_argument("--stream", type=Path, required=True)
    training.add_argument("--output", type=Path, required=True, help="of several bases, each has a folder in it")
    training.add_argument("--device", default="cuda")
    training.add_argument("--checkpoint", type=Path, help="a file to continue from and to renew; of several a folder")
    training.add_argument("--start", type=Path, help="an --output to continue from where no checkpoint is")
    training.add_argument("--memory", nargs="+", default=[], metavar="KEY=VALUE", help="options of swapped memories")
    training.add_argument("--minutes", type=float, help="stop after so long, leaving checkpoint and model as they are")
    training.add_argument("--fit", action="store_true", help="with --minutes, shorten the training to end in time")
    training.add_argument("--measure", action="store_true", help="measure on --text although time was up")
    training.add_argument("--no-compile", action="store_true", help="on a GPU, run the blocks as they are written")
    training.add_argument("--text", help="a text to measure the exported model on")
    training.add_argument("--no-export", action="store_true")
    for name, field in Settings.__dataclass_fields__.items():
        kind = count if name == "tokens" else type(field.default)
        training.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"default {field.default}")
    for command in (tokens, rows, training):
        command.add_argument("--tokenizer", type=Path, required=True)

    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
