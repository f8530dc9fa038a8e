"""Inspect a model by name: load it, read a text through it, rank its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surgery.data.texts import Text, load_text
from surgery.data.tokens import Tokens, encode, require_context
from surgery.errors import UsageError
from surgery.evaluation.loading import Located, load, locate
from surgery.inspection.horizon import (
    DEFAULT_METRIC,
    PIECES,
    LayerHorizon,
    check_metric,
    choices,
    measure_horizons,
    ranked,
    stability,
    static_horizons,
)

if TYPE_CHECKING:
    from surgery.inspection.probe import Probe

SEGMENT = 2048  # tokens read at once
LEAST_TOKENS = 256  # fewer say nothing of a layer that remembers for hundreds

Progress = Callable[[int, int], Any]  # tokens read, tokens in all


@dataclass(frozen=True)
class Inspection:
    """Figures of every layer that holds a mixer, in order.

    Attributes:
        model: its name. host: the family. path: the checkpoint directory.
        text: what was read; None for the estimate without data.
        tokens: how many tokens of it.
        probe: what a swap of each layer alone makes of the model, where that was asked for.
        revision: the commit of a model that came from a hub, None of any other.
    """

    model: str
    host: str
    path: Path
    figures: list[LayerHorizon]
    text: str | None
    tokens: int | None
    probe: Probe | None = None
    revision: str | None = None

    @property
    def static(self) -> bool:
        return self.text is None

    def as_dict(self, metric: str, top: int) -> dict[str, Any]:
        """Plain data; ``layers`` in order of layers, ``ranking`` the longest memory first, ``chosen`` its first K."""
        order = [figure.layer for figure in ranked(self.figures, metric)]
        return {
            "schema": 1,
            "kind": "inspection",
            "model": self.model,
            "revision": self.revision,
            "host": self.host,
            "estimate": "static" if self.static else "measured",
            "text": self.text,
            "tokens": self.tokens,
            "metric": metric,
            "ranking": order,
            "chosen": sorted(order[:top]),
            "choices": choices(self.figures, top),
            "stability": None if self.static else {"pieces": PIECES, "layers": stability(self.figures, metric, top)},
            "layers": [figure.as_dict() for figure in self.figures],
            "probe": self.probe.as_dict() if self.probe else None,
        }


def inspect_model(
    model: str | Path,
    data: Any = "bundled",
    tokens: int = 64_000,
    device: str = "cpu",
    *,
    revision: str | None = None,
    root: Path | None = None,
    progress: Progress | None = None,
    offload: bool | None = False,
    say: Callable[[str], Any] | None = None,
    probe: str | None = None,
    probe_progress: Progress | None = None,
) -> Inspection:
    """Measure alpha_t of every layer and head on a text, the state carried on through it.

    Args:
        model: ``bundled:NAME``, a checkpoint or run directory, or a hub id.
        data: a data specification; of the bundled text the part that training reads.
        tokens: at most this many tokens.
        root: where relative paths of ``data`` may stand; see :func:`surgery.data.texts.sources`.
        offload, say: see :func:`surgery.evaluation.loading.load`. The figures are the same.
        probe: a memory rule to try in each layer alone, on the text's beginning; see
            :func:`surgery.inspection.probe.probe_layers`. The model is then loaded in float32.
        probe_progress: called with the layers probed, and all of them.

    Raises:
        UsageError: no such model or text, an unsupported architecture, a text that is too short.
        JobError: damaged weights, decays that are not numbers.
    """
    from surgery.hosts import adapter_for, read_config

    text = inspected_text(data, tokens, root)
    located = locate(str(model), revision)
    dtype = torch.float32 if probe else None
    network, tokenizer = load(located, device, dtype, offload=offload, window=SEGMENT, say=say)
    windows = None
    if probe:  # cut first: a text too short for it is found before any work
        from surgery.inspection.probe import probe_layers, probe_windows

        windows = probe_windows(encode(tokenizer, text, tokens))
    found = inspect_loaded(network, tokenizer, text, tokens, located, progress=progress)
    if windows is None:
        return found
    config = read_config(located.path)
    result = probe_layers(network, adapter_for(config), config, windows, probe, progress=probe_progress)
    return replace(found, probe=result)


def inspected_text(data: Any, tokens: int, root: Path | None = None) -> Text:
    """Load as much of ``data`` as makes ``tokens`` tokens; of the bundled text the part that training reads."""
    return load_text(data, "train", root, limit=16 * tokens)


def inspected_tokens(tokenizer: Any, text: Text, tokens: int) -> Tokens:
    """The tokens that N_t is measured on.

    Raises:
        UsageError: a text that is too short to say anything.
    """
    encoded = encode(tokenizer, text, tokens)
    require_context(encoded, min(tokens, LEAST_TOKENS))
    return encoded


def inspect_loaded(
    network: Any, tokenizer: Any, text: Text, tokens: int, located: Located, *, progress: Progress | None = None
) -> Inspection:
    """As :func:`inspect_model`, of a model that is loaded and whose mixers are grafts."""
    from surgery.hosts import adapter_for, read_config

    adapter = adapter_for(read_config(located.path))
    encoded = inspected_tokens(tokenizer, text, tokens)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, len(encoded))

    figures = measure_horizons(network, adapter.mixers(network), encoded, segment=SEGMENT, progress=advance)
    about = (located.name, adapter.name, located.path)
    return Inspection(*about, figures, text.name, len(encoded), revision=located.revision)


def inspect_static(model: str | Path, revision: str | None = None) -> Inspection:
    """The estimate without data, from ``A_log`` and ``dt_bias`` alone.

    Raises:
        UsageError: no such model, an unsupported architecture, tensors missing.
    """
    from surgery.checkpoint.reading import explained
    from surgery.checkpoint.values import check_values
    from surgery.hosts import open_model, recognise

    located = locate(str(model), revision)
    _, adapter = recognise(located.path)
    checkpoint = open_model(located.path)
    with explained(located.path):
        layers = adapter.mixer_layers(checkpoint.config)
        prefixes = [adapter.tensor_prefix(checkpoint.config, layer) for layer in layers]
    names = [prefix + leaf for prefix in prefixes for leaf in ("A_log", "dt_bias")]
    missing = [name for name in names if name not in checkpoint.tensors]
    if missing:
        raise UsageError(f"{located.path}: tensor {missing[0]} is missing\n  config.json does not fit the weights")
    check_values(checkpoint, adapter.is_unused)
    with explained(located.path):
        log_decay = adapter.static_log_decay({name: checkpoint.read(name) for name in names}, checkpoint.config)
    for layer, prefix in zip(layers, prefixes, strict=True):
        if torch.isnan(log_decay[layer]).any():
            raise UsageError(
                f"{located.path}: layer {layer}: the log decay of {prefix}A_log and {prefix}dt_bias is not a number\n"
                "  exp(A_log) overflows where the step is 0; the weights are damaged"
            )
    about = (located.name, adapter.name, located.path)
    return Inspection(*about, static_horizons(log_decay), None, None, revision=located.revision)


def rank_layers(
    model: str | Path,
    metric: str = DEFAULT_METRIC,
    data: Any = "bundled",
    tokens: int = 64_000,
    device: str = "cpu",
    *,
    revision: str | None = None,
    root: Path | None = None,
    progress: Progress | None = None,
) -> list[LayerHorizon]:
    """Every layer's figures, the longest memory by ``metric`` first; arguments and errors as :func:`inspect_model`."""
    check_metric(metric)
    inspection = inspect_model(model, data, tokens, device, revision=revision, root=root, progress=progress)
    return ranked(inspection.figures, metric)
