"""What a run's model does on held-out text before and after its phases."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import torch

from surgery.adaptation.phases import Options
from surgery.checkpoint.staging import write_atomic
from surgery.data import checking
from surgery.data.sources import sources
from surgery.data.texts import Text, load_text
from surgery.data.tokens import encode, require_context
from surgery.evaluation.haystack import Haystack
from surgery.evaluation.loading import Located, load
from surgery.evaluation.recall import DEPTHS, needle_prompts
from surgery.evaluation.report import Measurement, RecallPlan, build_report, default_context, measure
from surgery.recipe import Recipe, shipped
from surgery.results import json_text

TOKENS = 16_384  # of the text at most; `surgery eval` reads more
CHARACTERS = 16 * TOKENS
SAMPLES = 5  # needles a length and depth


def check(recipe: Recipe, tokenizer: Any, progress: checking.Progress | None = None) -> None:
    """Find what :func:`figures` would refuse, before any training.

    Args:
        progress: called with a stage, done and total while local files are read.

    Raises:
        UsageError: the evaluation's text is missing or too short, or a recall length holds no needle.
    """
    with recipe.at(("evaluation", "text")):
        found = sources(recipe.evaluation_text, recipe.path.parent)
        checking.check([source for source in found if source.kind == "file"], "text", progress=progress)
        text = _text(recipe)
        tokens = encode(tokenizer, text, TOKENS)
        require_context(tokens, default_context(len(tokens)))
        haystack = Haystack(text.text, tokenizer)
    for index, length in enumerate(recipe.evaluation.recall.lengths):
        with recipe.at(("evaluation", "recall", "lengths", index)):
            needle_prompts(haystack, [length], DEPTHS, SAMPLES, recipe.seed)


def figures(
    recipe: Recipe, model: Path, name: str, options: Options, baseline: Measurement | None = None
) -> tuple[Measurement, dict[str, Any]]:
    """Measure a checkpoint in float32 on the recipe's evaluation text; the report compares it with ``baseline``."""
    located = Located(name, model)
    network, tokenizer = load(located, options.device, torch.float32)
    about = {"name": name, "revision": located.revision}
    plan = RecallPlan(recipe.evaluation.recall.lengths, samples=SAMPLES, seed=recipe.seed)
    with options.measuring() as watch:
        measured = measure(network, tokenizer, _text(recipe), **about, limit=TOKENS, recall=plan, progress=watch)
    return measured, build_report(measured, baseline)


def write_report(run: Path, name: str, report: dict[str, Any], recipe: Recipe, checkpoint: Path | None = None) -> None:
    """Write RUN/evaluation/NAME.json in one step, with the command that made it.

    Args:
        checkpoint: the model of the run that was measured; None: the base.
    """
    path = run / "evaluation" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    named = recipe.name if shipped().get(recipe.name) == recipe.path else str(recipe.path)
    settings = [word for setting in recipe.overrides for word in ("--set", setting)]
    report["command"] = shlex.join(["surgery", "distill", named, "--run", str(run), *settings])
    if checkpoint is not None:
        report["checkpoint"] = str(checkpoint.relative_to(run))
    write_atomic(path, json_text(report) + "\n")


def is_report(path: Path) -> bool:
    """Whether a report is there that can be read; one that cannot is made again."""
    try:
        return json.loads(path.read_bytes())["kind"] == "evaluation"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _text(recipe: Recipe) -> Text:
    return load_text(recipe.evaluation_text, "heldout", recipe.path.parent, limit=CHARACTERS)
