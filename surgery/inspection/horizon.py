"""How long each layer remembers: the forgetting horizon N_t = 1 / (1 - alpha_t) of every head on a text.

alpha_t = exp(g_t) is a head's decay at token t and N_t the number of tokens over which evidence adds up (Palimpsa,
arXiv 2602.09075, section 2.2). N_t is formed from the log decay as -1 / expm1(g), which keeps its digits where alpha_t
rounds to 1, and is capped at 2^24 tokens; the share that was capped is reported.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surgery.data.tokens import Tokens, require_context
from surgery.errors import JobError, UsageError
from surgery.evaluation.finite import first_nonfinite
from surgery.evaluation.perplexity import Reader, evaluating
from surgery.inspection.gains import GainMeter, cuts
from surgery.memory.base import MemoryGeometry, MemoryInputs
from surgery.memory.modules import device_of, fetched

METRICS = ("mean", "log-mean", "median")
DEFAULT_METRIC = "log-mean"  # the paper's only aggregate; a mean is moved by a few tokens near alpha = 1
PIECES = 4  # of a text, each of which is measured by itself too
CAP = 2.0**24
BINS_PER_OCTAVE = 256  # of the histogram behind the quantiles: 0.3% wide
_BINS = 24 * BINS_PER_OCTAVE + 1


def horizon(log_decay: Tensor) -> Tensor:
    """N = 1 / (1 - exp(log_decay)) in tokens, capped at 2^24; 1 at -inf, the cap at 0."""
    # the magnitude, because a decay of +0 must give infinity and not minus infinity
    return torch.expm1(log_decay.double()).abs().reciprocal().clamp(1.0, CAP)


@dataclass(frozen=True)
class LayerHorizon:
    """One layer's figures in tokens, over all tokens and heads (and key channels, where each has a decay of its own)
    unless said otherwise.

    Attributes:
        mean: arithmetic mean of N_t. log_mean: exp of the mean of log N_t, the paper's only aggregate.
        median, p10, p90: quantiles, to 0.3%.
        alpha: mean of alpha_t. capped: share of values at the cap.
        heads: mean of N_t over tokens, a head. heads_log_mean: the same for the log-mean.
        tokens: tokens read; None for the estimate without data.
        rule: the memory's rule. dose: its dose, None for the host's rule.
        diagnostics: figures a head of an upgraded layer's state after the text, and of its last writes, by name.
        gains: those of writes along the text, means over the heads; see :class:`surgery.inspection.gains.GainMeter`.
        pieces: each metric's figure on each quarter of the text alone; None for the estimate without data.
    """

    layer: int
    mean: float
    log_mean: float
    median: float
    p10: float
    p90: float
    alpha: float
    capped: float
    heads: list[float]
    heads_log_mean: list[float]
    tokens: int | None
    rule: str = "host"
    dose: float | None = None
    diagnostics: dict[str, list[float]] | None = None
    gains: dict[str, list[float]] | None = None
    pieces: list[dict[str, float]] | None = None

    def figure(self, metric: str) -> float:
        """The figure that ``metric`` ranks by."""
        check_metric(metric)
        return self.figures[metric]

    @property
    def figures(self) -> dict[str, float]:
        """The figure of every metric."""
        return {"mean": self.mean, "log-mean": self.log_mean, "median": self.median}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_metric(metric: str) -> None:
    """Refuse an unknown metric.

    Raises:
        UsageError: listing those there are.
    """
    if metric not in METRICS:
        raise UsageError(f"--metric {metric}: choose one of {', '.join(METRICS)}")


class HorizonMeter:
    """Figures of one layer, accumulated over calls in constant memory.

    Args:
        num_heads: H. channels: K, where each key channel has a decay of its own; a head's figures are then means over
            its channels.
    """

    def __init__(self, num_heads: int, device: torch.device | str = "cpu", channels: int | None = None) -> None:
        self.tokens = 0
        shape = (num_heads,) if channels is None else (num_heads, channels)
        self._sum = torch.zeros(shape, dtype=torch.float64, device=device)
        self._log_sum = torch.zeros_like(self._sum)
        self._decay_sum = torch.zeros_like(self._sum)
        self._alpha = torch.zeros_like(self._sum)
        self._capped = torch.zeros((), dtype=torch.int64, device=device)
        self._bins = torch.zeros(_BINS, dtype=torch.int64, device=device)

    def add(self, log_decay: Tensor) -> None:
        """Count log decays, [..., H] or [..., H, K]."""
        log_decay = log_decay.detach().double()
        log_decay = log_decay.reshape(-1, *self._sum.shape)
        values = horizon(log_decay)
        self.tokens += values.shape[0]
        self._sum += values.sum(0)
        self._log_sum += values.log().sum(0)
        self._decay_sum += log_decay.sum(0)
        self._alpha += log_decay.exp().sum(0)
        self._capped += (values >= CAP).sum()
        index = (values.log2() * BINS_PER_OCTAVE).long().clamp_(0, _BINS - 1)
        self._bins += torch.bincount(index.flatten(), minlength=_BINS)

    def merge(self, other: HorizonMeter) -> None:
        """Count what ``other`` has counted."""
        self.tokens += other.tokens
        for name in ("_sum", "_log_sum", "_decay_sum", "_alpha", "_capped", "_bins"):
            getattr(self, name).add_(getattr(other, name))

    @property
    def mean_log_decay(self) -> Tensor:
        """[H] or [H, K], mean of log alpha_t."""
        return self._decay_sum / self.tokens

    def quantile(self, share: float) -> float:
        """The value below which ``share`` of all tokens and heads lie, linear in log N inside a bin."""
        counts = self._bins.cpu().double()
        below = counts.cumsum(0)
        goal = share * below[-1].item()
        index = int(torch.searchsorted(below, goal).clamp_max(_BINS - 1))
        inside = (goal - (below[index - 1].item() if index else 0.0)) / max(counts[index].item(), 1.0)
        return min(2.0 ** ((index + min(max(inside, 0.0), 1.0)) / BINS_PER_OCTAVE), CAP)

    def result(self, layer: int, *, measured: bool = True, **about: Any) -> LayerHorizon:
        """The figures so far."""
        count = self.tokens * self._sum.numel()
        heads = self._sum.shape[0]
        return LayerHorizon(
            layer=layer,
            mean=self._sum.sum().item() / count,
            log_mean=math.exp(self._log_sum.sum().item() / count),
            median=self.quantile(0.5),
            p10=self.quantile(0.1),
            p90=self.quantile(0.9),
            alpha=self._alpha.sum().item() / count,
            capped=self._capped.item() / count,
            heads=(self._sum / self.tokens).view(heads, -1).mean(1).tolist(),
            heads_log_mean=(self._log_sum / self.tokens).view(heads, -1).mean(1).exp().tolist(),
            tokens=self.tokens if measured else None,
            **about,
        )


class TextMeter:
    """Figures of one layer over a text and over each of its pieces.

    Args:
        make: gives an empty meter.
        total: tokens of the text.
    """

    def __init__(self, make: Callable[[], HorizonMeter], total: int) -> None:
        self.make = make
        self.bounds = [total * piece // PIECES for piece in range(PIECES + 1)]
        self.pieces = [make() for _ in range(PIECES)]

    def add(self, log_decay: Tensor, before: int) -> None:
        """Count log decays [B, T, ...], which begin ``before`` tokens into the text."""
        for meter, first, end in zip(self.pieces, self.bounds, self.bounds[1:], strict=False):
            part = log_decay[:, max(0, first - before) : max(0, end - before)]
            if part.shape[1]:
                meter.add(part)

    @property
    def whole(self) -> HorizonMeter:
        found = self.make()
        for meter in self.pieces:
            found.merge(meter)
        return found

    def result(self, layer: int, **about: Any) -> LayerHorizon:
        """The figures so far."""
        pieces = [meter.result(layer).figures for meter in self.pieces if meter.tokens]
        return self.whole.result(layer, pieces=pieces, **about)


class _NotANumber(Exception):
    """Ends a forward pass at the first layer one of whose decays is not a number; its argument is the layer."""


def measure_horizons(
    model: nn.Module,
    mixers: Mapping[int, nn.Module],
    tokens: Tokens,
    *,
    segment: int = 2048,
    progress: Callable[[int], Any] | None = None,
) -> list[LayerHorizon]:
    """Stream a text through the model and watch each mixer's memory, the state carried on from segment to segment.

    Args:
        model: a causal language model whose mixers are grafts, in memory or streamed.
        mixers: the graft of each layer, as a host adapter names them.
        tokens: the text.
        segment: tokens a call.
        progress: called with the number of tokens just read.

    Returns:
        The figures of each layer, in order of layers; with ``diagnostics`` and ``gains`` where the memory is not the
        host's.

    Raises:
        UsageError: the text is empty.
        JobError: a decay that is not a number.
    """
    require_context(tokens, 1)
    device = device_of(model)
    meters: dict[int, TextMeter] = {}
    doses: dict[int, float] = {}
    diagnostics: dict[int, dict[str, list[float]]] = {}
    gains: dict[int, GainMeter] = {}
    last, before = False, 0

    def watch(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            inputs: MemoryInputs = args[0]
            if torch.isnan(inputs.log_decay).any():
                raise _NotANumber(layer)
            if layer not in meters:  # where the layer computes, which need not be where the next one does
                make = partial(_meter, module.geometry, inputs.log_decay.device)
                meters[layer] = TextMeter(make, len(tokens))
            meters[layer].add(inputs.log_decay, before)
            if module.rule == "host":
                return
            with fetched(module):  # here, where a streamed block is in memory
                gains.setdefault(layer, GainMeter()).add(module, inputs, args[1] if len(args) > 1 else None, before)
                if last:
                    doses[layer] = module.dose.item()
                    diagnostics[layer] = _diagnostics(module, output[1], meters[layer].whole.mean_log_decay)

        return hook

    handles = [mixer.memory.register_forward_hook(watch(layer)) for layer, mixer in mixers.items()]
    reader = Reader(model)
    try:
        with evaluating(model):
            upgraded = any(mixer.memory.rule != "host" for mixer in mixers.values())
            starts = cuts(len(tokens), segment, upgraded)
            for before, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
                last = end == len(tokens)
                ids = tokens.ids[before:end].to(device)
                try:
                    reader.read(ids[None], carry=True)
                except _NotANumber as error:
                    for handle in handles:
                        handle.remove()
                    name = getattr(model, "name_or_path", "") or type(model).__name__
                    raise JobError(
                        f"{name}: layer {error.args[0]}: a decay is not a number; first not finite: "
                        f"{first_nonfinite(model, ids[None])}\n  every weight is finite, but what they give leaves the "
                        "range of the dtype"
                    ) from None
                if progress is not None:
                    progress(ids.numel())
            figures = []
            for layer in sorted(mixers):
                memory = mixers[layer].memory
                about: dict[str, Any] = {"rule": memory.rule}
                if layer in diagnostics:
                    about |= {"dose": doses[layer], "diagnostics": diagnostics[layer] | gains[layer].last()}
                    about["gains"] = gains[layer].along()
                figures.append(meters[layer].result(layer, **about))
            return figures
    finally:
        for handle in handles:
            handle.remove()


def _meter(geometry: MemoryGeometry, device: torch.device) -> HorizonMeter:
    return HorizonMeter(geometry.num_heads, device, geometry.key_dim if geometry.channel_decay else None)


def _diagnostics(memory: nn.Module, state: Tensor, log_decay: Tensor) -> dict[str, list[float]]:
    """The memory's own figures of its state, a head; what it predicts for the next token, it predicts at the text's
    mean decay."""
    extra = {}
    if "log_decay" in inspect.signature(memory.diagnostics).parameters:
        extra["log_decay"] = log_decay.to(state.dtype).expand(state.shape[0], *log_decay.shape)
    return {name: value.double().tolist() for name, value in memory.diagnostics(state, **extra).items()}


def static_horizons(log_decay: Mapping[int, Tensor]) -> list[LayerHorizon]:
    """The estimate without data: each head's decay where its input projection gives 0, from A_log and dt_bias.

    Args:
        log_decay: [H] or [H, K] of each layer, as a host adapter's ``static_log_decay`` gives it.
    """
    figures = []
    for layer in sorted(log_decay):
        heads, *channels = log_decay[layer].shape
        meter = HorizonMeter(heads, channels=channels[0] if channels else None)
        meter.add(log_decay[layer][None])
        figures.append(meter.result(layer, measured=False))
    return figures


def ranked(figures: list[LayerHorizon], metric: str = DEFAULT_METRIC) -> list[LayerHorizon]:
    """By ``metric``, the longest memory first; equal layers in order."""
    check_metric(metric)
    return sorted(figures, key=lambda figure: (-figure.figure(metric), figure.layer))


def choices(figures: list[LayerHorizon], top: int) -> dict[str, list[int]]:
    """The ``top`` layers of longest memory by each metric, in order of layers."""
    return {metric: sorted(one.layer for one in ranked(figures, metric)[:top]) for metric in METRICS}


def stability(figures: list[LayerHorizon], metric: str, top: int) -> dict[int, int]:
    """In how many pieces of the text, each taken alone, a layer would be among the ``top`` by ``metric``: of each
    layer that is so in one of them. Empty for the estimate without data."""
    counts: Counter[int] = Counter()
    for piece in zip(*(one.pieces or [] for one in figures), strict=True):
        order = sorted(zip(figures, piece, strict=True), key=lambda pair: (-pair[1][metric], pair[0].layer))
        counts.update(one.layer for one, _ in order[:top])
    return dict(sorted(counts.items()))
