"""The paper's controlled collision: strengthen key B, write key A beside it many times, read with B.

m unit keys, A and B at an overlap and the others orthonormal to both, hold m one-hot values. They are written
``rounds`` times in the order A, B, then the others; then B is written ``boost`` times and A ``flood`` times. The figure
is the pairwise probability of B against A, sigmoid(y_B - y_A), read with key B. Four rules write:

    bayesian   the covariance is propagated, and the write goes along u = Pbar k
    reset      every step starts from l^2 I: the delta rule
    diagonal   of the propagated covariance only the diagonal is kept; key A lies along the first axis
    raw        the covariance of ``bayesian`` sets the gain g = k.u / (r^2 + k.u), but the write goes along k

Beside the probability: the variance k.P k along A and along B after every write, and the gain of every write.

Source: "Memory by Design: Probabilistic Sequence Layers", Sec. 4.1 and Appendix E.1 to E.4. It prints no figures of the
last two rules.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.errors import UsageError
from surgery.evaluation.plots import new_figure, save_figure
from surgery.kernels import dispatch

A, B = 0, 1  # rows of the keys
FILTERS = ("bayesian", "reset", "diagonal")  # rules with a covariance of their own
RULES = (*FILTERS, "raw")
LABELS = {
    "bayesian": "propagated (Bayesian)",
    "reset": "reset (delta rule)",
    "diagonal": "diagonal",
    "raw": "raw-key updates",
}
# as the paper prints them: the limit of many writes of B; the limits of many writes of A from the state after 40 of B
PRINTED = {"boost": 0.73106, "bayesian_flood": 0.72309, "reset_flood": 0.35138, "gain": 0.618, "growth": 0.00768}


@dataclass(frozen=True)
class Settings:
    """The settings of one collision; the defaults are the paper's.

    Attributes:
        boost, flood, rounds: numbers of writes; a round writes every key once.
        dim: D. pairs: m, keys and values. r2: observation noise. l2: process noise. p0: the first variance.
    """

    overlap: float = 0.92
    boost: int = 40
    flood: int = 60
    dim: int = 16
    r2: float = 0.05
    l2: float = 0.05
    p0: float = 3.0
    pairs: int = 6
    rounds: int = 2

    def __post_init__(self) -> None:
        if not -1 < self.overlap < 1:
            raise UsageError(f"--overlap {self.overlap}: distinct unit keys overlap by more than -1 and less than 1")
        for name in ("boost", "flood", "rounds"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name} {getattr(self, name)}: a number of writes is 0 or more")
        if self.rounds + self.boost + self.flood == 0:
            raise UsageError("--rounds 0 --boost 0 --flood 0: nothing is written; write something")
        if self.pairs < 2:
            raise UsageError(f"--pairs {self.pairs}: A and B are 2 pairs already")
        if self.dim < self.pairs:
            raise UsageError(
                f"--dim {self.dim}: {self.pairs} independent keys need at least {self.pairs} dimensions"
            )
        for name in ("r2", "l2", "p0"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise UsageError(f"--{name} {getattr(self, name)}: a variance is finite and above 0")

    def keys(self) -> Tensor:
        """Return the keys [m, D]: A along the first axis, B between the first two, the others along the next."""
        keys = torch.eye(self.pairs, self.dim, dtype=torch.float64)
        keys[B, A], keys[B, B] = self.overlap, math.sqrt(1 - self.overlap**2)
        return keys

    def writes(self) -> dict[str, list[int]]:
        """Return the keys that each phase writes, in order."""
        seed = [*range(self.pairs)] * self.rounds
        return {"seed": seed, "boost": [B] * self.boost, "flood": [A] * self.flood}


@dataclass(frozen=True)
class Collision:
    """What was measured.

    Attributes:
        measured, expected: the figures by name. ``gain`` is that of the last write of A, ``growth`` what it adds to the
            variance along B, both of the propagated covariance and expected at their limits.
        curves: for each rule the probability after every write. gains: its gain in every write. variances: for each
            rule with a covariance of its own, and for A and B, the variance along that key after every write.
        phases: how many writes each has.
    """

    settings: Settings
    measured: dict[str, float]
    expected: dict[str, float]
    curves: dict[str, list[float]]
    gains: dict[str, list[float]]
    variances: dict[str, dict[str, list[float]]]
    phases: dict[str, int]

    @property
    def printed(self) -> dict[str, float] | None:
        """The paper's figures, where the settings are the paper's; None otherwise."""
        return PRINTED if self.settings == Settings() else None

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.measured, "expected": self.expected, "paper": self.printed, "settings": asdict(self.settings),
            "curves": self.curves, "gains": self.gains, "variances": self.variances,
        }  # fmt: skip


class Memories:
    """The four memories in float64, on this project's own kernels: three heads of one Bayesian filter, and a delta rule
    whose step is the first one's gain."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.keys = settings, settings.keys()
        self.state = torch.zeros(1, len(FILTERS), settings.dim, settings.pairs + settings.dim, dtype=torch.float64)
        self.state[..., settings.pairs :] = settings.p0 * torch.eye(settings.dim, dtype=torch.float64)
        self.raw = torch.zeros(1, 1, settings.dim, settings.pairs, dtype=torch.float64)
        self.kept = torch.tensor([[[float(rule != "reset") for rule in FILTERS]]], dtype=torch.float64)

    def mean(self, rule: str) -> Tensor:
        """Return M [D, m]."""
        return self.raw[0, 0] if rule == "raw" else self.state[0, FILTERS.index(rule), :, : self.settings.pairs]

    def covariance(self, rule: str) -> Tensor:
        """Return P [D, D]; raw-key updates have the first rule's."""
        return self.state[0, FILTERS.index("bayesian" if rule == "raw" else rule), :, self.settings.pairs :]

    def probability(self, rule: str) -> float:
        """Return the probability of B against A, read with B."""
        read = self.mean(rule).T @ self.keys[B]
        return torch.sigmoid(read[B] - read[A]).item()

    def write(self, index: int) -> dict[str, float]:
        """Write key ``index`` into all memories, and return each rule's gain."""
        settings, key = self.settings, self.keys[index]
        one = torch.ones_like(self.kept)
        predicted = (self.kept * torch.stack([key @ self.covariance(rule) @ key for rule in FILTERS]))[0, 0]
        predicted = predicted + settings.l2 * key.square().sum()
        gain = predicted / (settings.r2 + predicted)
        k = key.expand(1, 1, 1, -1)
        v = torch.eye(settings.pairs, dtype=torch.float64)[index].expand(1, 1, 1, -1)
        _, self.state = dispatch.bayesian(
            k, k, v.expand(-1, -1, len(FILTERS), -1), one, self.kept, settings.l2 * one, one[0, 0], settings.r2 * one,
            one, one, one, state=self.state, initial_covariance=settings.p0 * one[0, 0], unit_gain=True,
        )  # fmt: skip
        diagonal = self.state[:, FILTERS.index("diagonal"), :, settings.pairs :]
        diagonal.copy_(torch.diag_embed(diagonal.diagonal(dim1=-2, dim2=-1)))
        step = gain[None, None, :1] / key.square().sum()
        _, self.raw = dispatch.delta(k, k, v, torch.zeros_like(step), step, state=self.raw)
        return {**dict(zip(FILTERS, gain.tolist(), strict=True)), "raw": gain[0].item()}


def collision(settings: Settings) -> Collision:
    """Write into all memories, and read with B after every write."""
    memories = Memories(settings)
    phases = settings.writes()
    curves: dict[str, list[float]] = {rule: [] for rule in RULES}
    gains: dict[str, list[float]] = {rule: [] for rule in RULES}
    variances: dict[str, dict[str, list[float]]] = {rule: {"A": [], "B": []} for rule in FILTERS}
    measured, expected = {}, {}
    for phase, writes in phases.items():
        rules = {"boost": ("bayesian",), "flood": RULES}.get(phase, ())
        names = {rule: "boost" if phase == "boost" else f"{rule}_flood" for rule in rules}
        expected |= {name: _repeated(memories, rule, writes) for rule, name in names.items()}
        for index in writes:
            before = _along(memories, "bayesian", B)
            for rule, gain in memories.write(index).items():
                gains[rule].append(gain)
                curves[rule].append(memories.probability(rule))
            for rule, along in variances.items():
                for name, key in (("A", A), ("B", B)):
                    along[name].append(_along(memories, rule, key))
        measured |= {name: memories.probability(rule) for rule, name in names.items()}
    if phases["flood"]:
        measured |= {"gain": gains["bayesian"][-1], "growth": variances["bayesian"]["B"][-1] - before}
        expected |= {
            "gain": settled_gain(settings.r2, settings.l2), "growth": (1 - settings.overlap**2) * settings.l2
        }
    lengths = {phase: len(writes) for phase, writes in phases.items()}
    return Collision(settings, measured, expected, curves, gains, variances, lengths)


def settled_gain(r2: float, l2: float) -> float:
    """Return the limit of a repeated unit key's gain, x / (r^2 + x) at the fixed point x of x' = r^2 x / (r^2 + x) +
    l^2 (Appendix E.1)."""
    x = (l2 + math.sqrt(l2**2 + 4 * r2 * l2)) / 2
    return x / (r2 + x)


def _along(memories: Memories, rule: str, index: int) -> float:
    """The variance along key ``index``."""
    return (memories.keys[index] @ memories.covariance(rule) @ memories.keys[index]).item()


def _repeated(memories: Memories, rule: str, writes: list[int]) -> float:
    """The probability after ``writes`` of one unit key, from scalars alone.

    Along the key the predicted variance follows x' = c r^2 x / (r^2 + x) + l^2 (Appendix E.1), its covariance with B
    shrinks by the same factor, and so does the innovation; no covariance matrix is propagated. c is 1, or 0 for the
    reset rule. The other rules write along the key itself: of their covariance with B the overlap is the whole.
    """
    if not writes:
        return memories.probability(rule)
    settings, index = memories.settings, writes[0]
    key, query = memories.keys[index], memories.keys[B]
    mean, covariance = memories.mean(rule), memories.covariance(rule)
    overlap, kept = (key @ query).item(), float(rule != "reset")
    variance, shared = (key @ covariance @ key).item(), (query @ covariance @ key).item()
    error = torch.eye(settings.pairs, dtype=torch.float64)[index] - mean.T @ key
    read = mean.T @ query
    for _ in writes:
        variance, shared = kept * variance + settings.l2, kept * shared + settings.l2 * overlap
        read = read + (shared if rule == "bayesian" else overlap * variance) / (settings.r2 + variance) * error
        remains = settings.r2 / (settings.r2 + variance)
        variance, shared, error = variance * remains, shared * remains, error * remains
    return torch.sigmoid(read[B] - read[A]).item()


def plot(result: Collision, path: str | Path) -> None:
    """Draw the probability of B, the variances along A and B and the gain over the writes, the phases marked.

    Raises:
        UsageError: no file can be written there, or the suffix is no picture's.
    """
    settings = result.settings
    figure = new_figure(13, 3.8)
    retrieval, variance, gain = figure.subplots(1, 3)
    writes = range(1, sum(result.phases.values()) + 1)
    for number, rule in enumerate(RULES):
        retrieval.plot(writes, result.curves[rule], label=LABELS[rule], color=f"C{number}")
        if rule in FILTERS:
            for name, style in (("A", ":"), ("B", "-")):
                along, label = result.variances[rule][name], f"{LABELS[rule]}, along {name}"
                variance.plot(writes, along, label=label, color=f"C{number}", linestyle=style)
            gain.plot(writes, result.gains[rule], label=LABELS[rule], color=f"C{number}")
    start = 0
    for phase, length in result.phases.items():
        for axes in (retrieval, variance, gain) if length else ():
            axes.axvline(start + 0.5, color="0.8", linewidth=0.8, zorder=0)
            axes.text(start + 1, 1.01, phase, fontsize="small", color="0.4", transform=axes.get_xaxis_transform())
        start += length
    retrieval.axhline(0.5, color="0.8", linewidth=0.8, linestyle=":", zorder=0)
    retrieval.set(ylabel="p(B against A), read with B", ylim=(0, 1))
    variance.set(ylabel="variance k.P k after the write", yscale="log")
    gain.set(ylabel="gain k.u / (r² + k.u)", ylim=(0, 1))
    gain.axhline(settled_gain(settings.r2, settings.l2), color="0.8", linewidth=0.8, linestyle=":", zorder=0)
    for axes in (retrieval, variance, gain):
        axes.set(xlabel="write", xlim=(0.5, start + 0.5))
        axes.legend(frameon=False, fontsize="x-small", loc="best")
    figure.suptitle(f"overlap {settings.overlap:g}, r² = {settings.r2:g}, l² = {settings.l2:g}", fontsize="medium")
    save_figure(figure, path)
