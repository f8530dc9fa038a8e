"""The paper's controlled collision: strengthen key B, write key A beside it many times, read with B.

Six unit keys, A and B at an overlap and four orthonormal to both, hold six one-hot values. They are written twice in
the order A, B, then the others; then B is written ``boost`` times and A ``flood`` times. The figure is the pairwise
probability of B against A, sigmoid(y_B - y_A), read with key B. The Bayesian rule propagates its covariance; the reset
rule starts every step from l^2 I, which is the delta rule.

Source: "Memory by Design: Probabilistic Sequence Layers", Sec. 4.1 and Appendix E.1 to E.4.
"""

from __future__ import annotations

import io
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.checkpoint.staging import check_file, write_result
from surgery.errors import UsageError
from surgery.kernels import dispatch

KEYS = 6
INITIAL_COVARIANCE = 3.0
RULES = ("bayesian", "reset")
# as the paper prints them: the limit of many writes of B; the limits of many writes of A from the state after 40 of B
PRINTED = {"boost": 0.73106, "bayesian_flood": 0.72309, "reset_flood": 0.35138}


@dataclass(frozen=True)
class Settings:
    """The settings of one collision; the defaults are the paper's.

    Attributes:
        noise: both r^2 and l^2. boost, flood: numbers of writes.
    """

    overlap: float = 0.92
    boost: int = 40
    flood: int = 60
    dim: int = 16
    noise: float = 0.05

    def __post_init__(self) -> None:
        if not -1 < self.overlap < 1:
            raise UsageError(f"--overlap {self.overlap}: distinct unit keys overlap by more than -1 and less than 1")
        for name in ("boost", "flood"):
            if getattr(self, name) < 0:
                raise UsageError(f"--{name} {getattr(self, name)}: a number of writes is 0 or more")
        if self.dim < KEYS:
            raise UsageError(f"--dim {self.dim}: {KEYS} independent keys need at least {KEYS} dimensions")
        if not (self.noise > 0 and math.isfinite(self.noise)):
            raise UsageError(f"--noise {self.noise}: a variance is finite and above 0")


@dataclass(frozen=True)
class Collision:
    """What was measured. ``curves``: for each rule, the probability after every write; ``phases``: their lengths."""

    settings: Settings
    measured: dict[str, float]
    expected: dict[str, float]
    curves: dict[str, list[float]]
    phases: dict[str, int]

    @property
    def printed(self) -> dict[str, float] | None:
        """The paper's figures, where the settings are the paper's; None otherwise."""
        return PRINTED if self.settings == Settings() else None

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.measured, "expected": self.expected, "paper": self.printed, "settings": asdict(self.settings),
            "curves": self.curves,
        }


def collision(settings: Settings) -> Collision:
    """Run both rules in float64, as two heads of one filter that differ in whether the covariance is kept."""
    keys = torch.eye(KEYS, settings.dim, dtype=torch.float64)
    keys[1, 0], keys[1, 1] = settings.overlap, math.sqrt(1 - settings.overlap**2)
    a, b = 0, 1
    phases = {"seed": [*range(KEYS)] * 2, "boost": [b] * settings.boost, "flood": [a] * settings.flood}
    state = torch.zeros(1, len(RULES), settings.dim, KEYS + settings.dim, dtype=torch.float64)
    state[..., KEYS:] = INITIAL_COVARIANCE * torch.eye(settings.dim, dtype=torch.float64)
    curves: dict[str, list[float]] = {rule: [] for rule in RULES}
    expected = {}
    for phase, writes in phases.items():
        if phase == "boost":
            expected["boost"] = _repeated(state[0, 0], keys, b, settings, kept=1.0)
        if phase == "flood":
            for head, rule in enumerate(RULES):
                expected[f"{rule}_flood"] = _repeated(state[0, head], keys, a, settings, kept=1.0 - head)
        if writes:
            reads, state = _write(state, keys, writes, settings)
            for head, rule in enumerate(RULES):
                curves[rule] += torch.sigmoid(reads[:, head, b] - reads[:, head, a]).tolist()
    before_flood = 2 * KEYS + settings.boost - 1
    measured = {"boost": curves["bayesian"][before_flood]}
    measured |= {f"{rule}_flood": curves[rule][-1] for rule in RULES}
    return Collision(settings, measured, expected, curves, {phase: len(writes) for phase, writes in phases.items()})


def _write(state: Tensor, keys: Tensor, writes: list[int], settings: Settings) -> tuple[Tensor, Tensor]:
    """The reads [T, rule, KEYS] with key B after each write, and the state after the last."""
    k = keys[writes][None, :, None]
    v = torch.eye(KEYS, dtype=torch.float64)[writes][None, :, None].expand(-1, -1, len(RULES), -1)
    one = torch.ones(1, len(writes), len(RULES), dtype=torch.float64)
    kept = one * torch.tensor([1.0, 0.0], dtype=torch.float64)
    noise = settings.noise * one
    reads, state = dispatch.bayesian(
        keys[1].expand_as(k), k, v, one, kept, noise, one[0, 0], noise, one, one, one,
        state=state, initial_covariance=INITIAL_COVARIANCE * one[0, 0], unit_gain=True,
    )
    return reads[0], state


def _repeated(state: Tensor, keys: Tensor, index: int, settings: Settings, kept: float) -> float:
    """The probability after many writes of one unit key, from scalars alone.

    Along the key the predicted variance follows x' = c r^2 x / (r^2 + x) + l^2 (Appendix E.1), its covariance with B
    shrinks by the same factor, and so does the innovation; no covariance matrix is propagated. ``kept`` is c: 1, or 0
    for the reset rule, whose innovation is then a geometric series.
    """
    mean, covariance = state[:, :KEYS], state[:, KEYS:]
    key, query, noise = keys[index], keys[1], settings.noise
    count = settings.boost if index == 1 else settings.flood
    overlap = (key @ query).item()
    variance, shared = (key @ covariance @ key).item(), (query @ covariance @ key).item()
    error = torch.eye(KEYS, dtype=torch.float64)[index] - mean.T @ key
    read = mean.T @ query
    for _ in range(count):
        variance, shared = kept * variance + noise, kept * shared + noise * overlap
        read = read + shared / (noise + variance) * error
        remains = noise / (noise + variance)
        variance, shared, error = variance * remains, shared * remains, error * remains
    return torch.sigmoid(read[1] - read[0]).item()


def plot(result: Collision, path: str | Path) -> None:
    """Draw the probability of B after every write, one curve a rule, the phases marked.

    Raises:
        UsageError: no file can be written there, or matplotlib writes no such format.
    """
    path = Path(path)
    check_file(path, "--plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise UsageError(f"--plot {path}: no such picture format; use a name that ends in .png, .svg or .pdf")
    axes = figure.add_subplot()
    labels = {"bayesian": "covariance propagated (Bayesian)", "reset": "covariance reset (delta rule)"}
    for rule, curve in result.curves.items():
        axes.plot(range(1, len(curve) + 1), curve, label=labels[rule])
    start = 0
    for phase, length in result.phases.items():
        if length:
            axes.axvline(start + 0.5, color="0.8", linewidth=0.8, zorder=0)
            axes.text(start + 1, 0.02, f"{phase}\n{length}", fontsize="small", color="0.4")
        start += length
    axes.axhline(0.5, color="0.8", linewidth=0.8, linestyle=":", zorder=0)
    axes.set(xlabel="write", ylabel="p(B against A), read with B", ylim=(0, 1), xlim=(0.5, start + 0.5))
    axes.set_title(f"overlap {result.settings.overlap:g}, r² = l² = {result.settings.noise:g}", fontsize="medium")
    axes.legend(frameon=False, loc="upper right", fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix[1:].lower())
    write_result(path, picture.getvalue())
