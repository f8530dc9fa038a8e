"""A recipe ready to run, with the layers that an inspection chose."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from surgery.checkpoint.staging import check_file, write_atomic
from surgery.errors import UsageError
from surgery.inspection.horizon import ranked
from surgery.inspection.measure import Inspection

MEMORIES = ("palimpsa", "bayesian")
DEFAULT_MEMORY = {"additive": "palimpsa", "delta": "bayesian"}  # by the style of the host's own rule: exact at dose 0

_OPTIONS = {
    "palimpsa": """\
  b_scale: [0.1, 1.0]           # the paper's range of the raw importance scale, drawn uniformly
  learn_prior: false            # the prior precision stays at 1
""",
    "bayesian": """\
  noise: restoring              # restoring: forgetting returns the covariance to its prior | constant: the paper's l^2
  noise_from: head              # head: one noise per head | token: each token's input sets it, as the paper's l_t^2
  retention: 1.0                # rho: the covariance decays with rho a_t^2
  noise_groups: 1               # split each head's values into groups with a covariance each
  rotations: false              # true: decays also turn pairs of key channels, by angles that are learned
""",
}


def draft_recipe(inspection: Inspection, metric: str, top: int, memory: str, data: Any) -> str:
    """The YAML of a recipe that swaps the ``top`` layers of longest memory.

    Args:
        data: the specification of the text that was read, which also becomes the training text.
    """
    from surgery.hosts import adapter_for, read_config
    from surgery.memory import create

    config = read_config(inspection.path)
    chosen = ranked(inspection.figures, metric)[:top]
    layers = sorted(figure.layer for figure in chosen)
    exact = create(memory, adapter_for(config).geometry(config, layers[0])).exact_limit
    bundled = inspection.model.startswith("bundled:")
    local = not bundled and Path(inspection.model).expanduser().is_dir()
    model = str(inspection.path.resolve()) if local else inspection.model
    named = f"model: {_scalar(model)}"
    if inspection.revision is not None and not local:
        named += f"\nrevision: {_scalar(inspection.revision)}"
    how = "estimated from A_log and dt_bias, without data" if inspection.static else f"measured on {inspection.text}"
    figures = "\n".join(f"#   layer {figure.layer:>3}  {figure.figure(metric):>12.1f}" for figure in chosen)
    budget = _BUNDLED_BUDGET if bundled else _BUDGET
    own = "" if bundled or data != "bundled" else "  # PUT YOUR OWN TEXT HERE: a path, a list, hub:NAME or a mixture"
    drift = _EXACT if exact else _INEXACT
    return f"""\
# {memory.capitalize()} in {inspection.model}: the {top} layers of longest memory.
#
# N_t in tokens, {metric} over tokens and heads; {how}:
{figures}
#
#   surgery validate THIS         surgery apply THIS --output DIR         surgery distill THIS --run RUN

{named}
layers: {layers}{" " * max(1, 24 - len(str(layers)))}# as a rule that measures again: {{top: {top}, by: {metric}}}

memory:
  rule: {memory}
  start: exact                  # exact: dose 0, the host's function | paper: dose 1, the full rule
{_OPTIONS[memory]}
{drift}seed: 0
data: {_data(data)}{own}

phases:
  # Each new layer reads what the old one read and learns to answer as it did; all layers at once, the rest frozen.
  - name: align
    kind: hidden
    tokens: {budget["align"]}
    context: {budget["context"]}
    batch: {budget["batch"]}
    learning_rate: 1.0e-3
    schedule: cosine
    warmup: 0.1
    trainable: swapped
    dose: {{from: 0, to: 1, over: 0.5}}

  # The whole model against the base: KL of the next-token distribution, and the residual stream after each new layer.
  - name: distill
    kind: logits
    tokens: {budget["distill"]}
    context: {budget["context"]}
    batch: {budget["batch"]}
    learning_rate: 1.0e-4
    schedule: cosine
    warmup: 0.1
    trainable: swapped

evaluation:
  text: bundled
  recall: {{lengths: {budget["lengths"]}}}

export:
  dtype: {"float32" if bundled else "bfloat16"}
"""


_EXACT = "max_drift: {kl: 1.0e-6}         # nats a token; apply fails above it and leaves nothing\n"
_INEXACT = "# max_drift: {kl: 0.1}          # at dose 0 this rule is not quite the host's: apply says how far it is\n"
_BUNDLED_BUDGET = {"align": "40k", "distill": "60k", "context": 256, "batch": "2k", "lengths": [256, 512, 1024]}
_BUDGET = {"align": "20M", "distill": "50M", "context": 2048, "batch": "64k", "lengths": [1024, 2048, 4096]}


def write_recipe(path: Path, text: str) -> None:
    """Write a new file that ``surgery validate`` accepts; an existing file is never touched.

    Raises:
        UsageError: the file exists, or its directory does not.
        JobError: the disk is full.
    """
    from surgery.recipe import load_recipe

    check_recipe_path(path)
    path.open("x").close()  # whoever made it meanwhile keeps it
    try:
        write_atomic(path, text)
        load_recipe(path)
    except BaseException:
        path.unlink()
        raise


def check_recipe_path(path: Path) -> None:
    """Refuse a place where no new recipe can be written, before any work.

    Raises:
        UsageError: the file exists, or cannot be written there, or its name is not a recipe's.
    """
    check_file(path, "--recipe")
    if path.exists():
        raise UsageError(f"--recipe {path}: exists already, and is not overwritten; name another file")
    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"--recipe {path}: the name must end in .yaml")


def _data(data: Any) -> str:
    if isinstance(data, str) and Path(data).expanduser().exists():
        data = str(Path(data).expanduser().resolve())
    return _scalar(data)


def _scalar(value: str) -> str:
    """A YAML string, bare where that reads back as itself."""
    import yaml

    bare = re.fullmatch(r"[A-Za-z/][\w./:,=-]*", value) and yaml.safe_load(value) == value
    return value if bare else json.dumps(value)
