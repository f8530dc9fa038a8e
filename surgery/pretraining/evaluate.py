"""Measure a base against its bars on any text file:

    python -m surgery.pretraining.evaluate bundled:tiny-mamba2 --text FILE

Bits a byte with the state carried on over the whole file, recall of needles in it by length and depth, and how far the
layers' forgetting horizons spread; with ``--lists``, in place of the latter two, exact recall of lists.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from surgery.data.texts import load_text
from surgery.data.tokens import Tokens, encode
from surgery.errors import UserError
from surgery.evaluation.perplexity import stream_losses
from surgery.evaluation.recall import needle_recall
from surgery.evaluation.words import KINDS
from surgery.graft import Graft
from surgery.inspection.horizon import measure_horizons
from surgery.pretraining.bases import CONTEXT
from surgery.pretraining.list_recall import CELLS, Cell, list_recall, table
from surgery.pretraining.report import say
from surgery.pretraining.tokenizer import load_tokenizer as plain_tokenizer

BITS_PER_BYTE = 1.45  # at most
RECALL = 0.8  # at least, at 256 tokens
RECALL_BITS_PER_BYTE = 1.18  # at most, of a base that can recall
EXACT, LIMITED = 0.9, 0.6  # exact recall of 8 pairs within 512 tokens, at least; lowest within 2048, at most
SPREAD = 5.0  # at least, largest over smallest mean horizon of a layer
LENGTHS = (256, 512, CONTEXT, 2 * CONTEXT, 4 * CONTEXT, 8 * CONTEXT)
HORIZON_TOKENS = 65536


def horizons(model: torch.nn.Module, tokens: Tokens) -> dict[str, Any]:
    """Each layer's mean forgetting horizon N = 1/(1 - alpha) over heads and tokens; the largest over the smallest."""
    mixers = {module.layer_idx: module for module in model.modules() if isinstance(module, Graft)}
    figures = measure_horizons(model, mixers, tokens)
    means = [figure.mean for figure in figures]
    logs = [figure.log_mean for figure in figures]
    return {"mean": means, "log_mean": logs, "spread": max(means) / min(means), "tokens": len(tokens)}


def evaluate(
    model: torch.nn.Module,
    tokenizer: Any,
    text: str,
    *,
    name: str = "text",
    lengths: Sequence[int] = LENGTHS,
    samples: int = 20,
    kinds: Sequence[str] = KINDS[:2],
    limit: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Bits a byte, recall and horizons of ``model`` on ``text``, with the bars beside them.

    Args:
        kinds: of needles; the bar is read from the first.
        limit: tokens of the text for bits a byte; all by default.
    """
    started = time.monotonic()
    tokens = encode(tokenizer, text, limit)
    losses = stream_losses(model, tokens, segment=8192 if next(model.parameters()).is_cuda else 2048)
    say(f"bits a byte {losses.bits_per_byte:.4f} over {losses.num_bytes} bytes ({time.monotonic() - started:.0f} s)")
    head = Tokens(tokens.ids[:HORIZON_TOKENS], tokens.ends[:HORIZON_TOKENS], tokens.name)
    spread = horizons(model, head)
    say(f"mean horizons by layer {[round(mean, 1) for mean in spread['mean']]}, spread {spread['spread']:.1f}")
    recall = {}
    for kind in kinds:
        recall[kind] = needle_recall(model, tokenizer, text, lengths, samples=samples, seed=seed, kind=kind)
        curve = {item["length"]: round(item["fraction"], 3) for item in recall[kind]["lengths"]}
        say(f"recall of {kind} {curve} ({time.monotonic() - started:.0f} s)")
    first = recall[kinds[0]]["lengths"][0]
    return {
        "text": name,
        "language": losses.as_dict(),
        "horizons": spread,
        "recall": recall,
        "bars": {
            "bits_per_byte": {"bar": BITS_PER_BYTE, "measured": losses.bits_per_byte},
            f"recall at {first['length']}": {"bar": RECALL, "measured": first["fraction"]},
            "horizon spread": {"bar": SPREAD, "measured": spread["spread"]},
        },
    }


def evaluate_recall(
    model: torch.nn.Module,
    tokenizer: Any,
    plain: Any,
    text: str,
    *,
    name: str = "text",
    documents: int = 200,
    cells: Sequence[Cell] = CELLS,
    limit: int | None = None,
) -> dict[str, Any]:
    """Bits a byte on ``text`` and exact recall of lists, beside the bars of a base that can recall.

    Args:
        tokenizer: transformers' form of the tokenizer. plain: its ``tokenizers.Tokenizer``.
        documents: of each cell of :func:`surgery.pretraining.list_recall.list_recall`. cells: one of 8 pairs is needed.
        limit: tokens of the text for bits a byte; all by default.
    """
    started = time.monotonic()
    lists = list_recall(model, plain, text, cells=cells, documents=documents)
    say(f"{table(lists)} ({time.monotonic() - started:.0f} s)")
    losses = stream_losses(
        model, encode(tokenizer, text, limit), segment=8192 if next(model.parameters()).is_cuda else 2048
    )
    say(f"bits a byte {losses.bits_per_byte:.4f} over {losses.num_bytes} bytes ({time.monotonic() - started:.0f} s)")
    trained = [item for item in lists if item["form"] == "trained"]
    eight = [item["exact"] for item in trained if item["pairs"] == 8 and item["tokens"] <= 520]
    within = [item["exact"] for item in trained if item["tokens"] <= 2048]
    return {
        "text": name,
        "language": losses.as_dict(),
        "lists": lists,
        "bars": {
            "bits_per_byte": {"bar": RECALL_BITS_PER_BYTE, "measured": losses.bits_per_byte},
            "8 pairs within 512": {"bar": EXACT, "measured": min(eight)},
            "limited within 2048": {"bar": LIMITED, "measured": min(within)},
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m surgery.pretraining.evaluate", description=__doc__)
    parser.add_argument("model", help="bundled:NAME or a checkpoint directory")
    parser.add_argument("--text", required=True, help="a text file, .xz allowed, or 'bundled'")
    parser.add_argument("--limit", type=int, help="read only so many tokens for bits a byte")
    parser.add_argument("--samples", type=int, default=20, help="needles for each length and depth")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of needle prompts")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS[:2]))
    parser.add_argument("--lists", action="store_true", help="exact recall of lists in place of needles and horizons")
    parser.add_argument("--documents", type=int, default=200, help="lists for each number of pairs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", metavar="FILE", help="write the result there instead of to stdout")
    options = parser.parse_args(arguments)
    from surgery.evaluation.loading import load_tokenizer
    from surgery.hosts import load_model, resolve

    try:
        path = resolve(options.model)
        model = load_model(path, dtype=torch.float32, device=options.device)
        text = load_text(options.text)
        told = {"name": text.name, "limit": options.limit}
        if options.lists:
            result = evaluate_recall(
                model, load_tokenizer(path), plain_tokenizer(path), text.text, documents=options.documents, **told
            )
        else:
            needles = {"lengths": options.lengths, "samples": options.samples, "kinds": options.kinds}
            result = evaluate(model, load_tokenizer(path), text.text, **needles, **told)
    except UserError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
    written = json.dumps(result, indent=1)
    if options.json:
        Path(options.json).write_text(written + "\n", encoding="utf-8")
    else:
        print(written)


if __name__ == "__main__":
    main()
