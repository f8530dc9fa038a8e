"""Where the Bayesian Layer writes as two keys come to overlap, and how often it can be written on.

As in the collision, B is written many times, then A at an overlap rho. A = rho B + sqrt(1 - rho^2) k_perp, and the
first write of A goes along

    u = Pbar A, about rho s_B B + sqrt(1 - rho^2) s_perp k_perp        s_B, s_perp: the variances along B and k_perp

which is exact once the covariance between the two has contracted to zero. A write along u moves what B reads by
(B.u) / (A.u) of what it moves A's read; a write along the raw key by rho. With the writes of A the gain tends to
x / (r^2 + x), and the variance along B grows by (1 - rho^2) l^2 each.

Source: "Memory by Design: Probabilistic Sequence Layers", Fig. 2 and Eq. (15); Appendix E.1 and E.2 for the limits.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from surgery.errors import UsageError
from surgery.evaluation.plots import new_figure, save_figure
from surgery.experiments.collision import A, B, Memories, Settings, settled_gain

OVERLAPS = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.98)
# as the paper prints them, the growth at overlap 0.92
PRINTED = {"gain": 0.618, "growth": 0.00768, "growth_overlap": 0.92}


@dataclass(frozen=True)
class Write:
    """The writes of A at one overlap.

    Attributes:
        along_b, along_perp: components of the unit vector along u in the first write of A. predicted_b, predicted_perp:
            the same by Eq. (15).
        moves_b: (B.u) / (A.u), what a write of A moves B's read by, as a share of A's.
        gain: of the last write of A. growth: what that write adds to the variance along B.
        expected_gain, expected_growth: their limits.
    """

    overlap: float
    along_b: float
    along_perp: float
    predicted_b: float
    predicted_perp: float
    moves_b: float
    gain: float
    expected_gain: float
    growth: float
    expected_growth: float


@dataclass(frozen=True)
class Geometry:
    """Writes at growing overlap; ``settings`` are those of the collision, their overlap aside."""

    settings: Settings
    writes: list[Write]

    @property
    def printed(self) -> dict[str, float] | None:
        """The paper's figures, where all settings but the overlap are the paper's; None otherwise."""
        return PRINTED if replace(self.settings, overlap=Settings.overlap) == Settings() else None

    def as_dict(self) -> dict[str, Any]:
        settings = {name: value for name, value in asdict(self.settings).items() if name != "overlap"}
        return {"settings": settings, "paper": self.printed, "writes": [asdict(write) for write in self.writes]}


def geometry(settings: Settings, overlaps: tuple[float, ...] = OVERLAPS) -> Geometry:
    """Measure the write of A at every overlap.

    Raises:
        UsageError: no overlap, or one that no two distinct unit keys have; no write of A.
    """
    if not overlaps:
        raise UsageError("--overlaps: name at least one")
    if settings.flood < 1:
        raise UsageError(f"--flood {settings.flood}: the direction is that of a write of A; use 1 or more")
    try:
        cases = [replace(settings, overlap=overlap) for overlap in overlaps]
    except UsageError as error:
        raise UsageError(str(error).replace("--overlap ", "--overlaps ", 1)) from None
    return Geometry(settings, [_measure(case) for case in cases])


def _measure(settings: Settings) -> Write:
    memories, keys, overlap = Memories(settings), settings.keys(), settings.overlap
    phases = settings.writes()
    for index in phases["seed"] + phases["boost"]:
        memories.write(index)
    across = math.sqrt(1 - overlap**2)
    perp = (keys[A] - overlap * keys[B]) / across
    predicted = memories.covariance("bayesian").clone()
    predicted.diagonal().add_(settings.l2)
    u = predicted @ keys[A]
    unit = u / u.norm()
    eq15 = overlap * (keys[B] @ predicted @ keys[B]) * keys[B] + across * (perp @ predicted @ perp) * perp
    eq15 = eq15 / eq15.norm()
    for index in phases["flood"]:
        before = keys[B] @ memories.covariance("bayesian") @ keys[B]
        gain = memories.write(index)["bayesian"]
    growth = keys[B] @ memories.covariance("bayesian") @ keys[B] - before
    return Write(
        overlap=overlap,
        along_b=(unit @ keys[B]).item(),
        along_perp=(unit @ perp).item(),
        predicted_b=(eq15 @ keys[B]).item(),
        predicted_perp=(eq15 @ perp).item(),
        moves_b=((keys[B] @ u) / (keys[A] @ u)).item(),
        gain=gain,
        expected_gain=settled_gain(settings.r2, settings.l2),
        growth=growth.item(),
        expected_growth=across**2 * settings.l2,
    )


def plot(result: Geometry, path: str | Path) -> None:
    """Draw keys and writes as arrows in the plane of A and B, and what a write of A moves B's read by.

    Raises:
        UsageError: no file can be written there, or the suffix is no picture's.
    """
    from matplotlib import colormaps

    figure = new_figure(9, 4)
    plane, moves = figure.subplots(1, 2)
    colours = colormaps["viridis"]
    for write in result.writes:
        colour = colours(abs(write.overlap))
        key = (write.overlap, math.sqrt(1 - write.overlap**2))
        plane.plot([0, key[0]], [0, key[1]], color=colour, linestyle=":", linewidth=1)
        end = (write.along_b, write.along_perp)
        plane.annotate("", end, (0, 0), arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.5})
        plane.text(1.04 * key[0], 1.04 * key[1], f"{write.overlap:g}", fontsize="x-small", color=colour)
    plane.annotate("", (1, 0), (0, 0), arrowprops={"arrowstyle": "->", "color": "black"})
    plane.text(1.02, -0.06, "B", fontsize="small")
    plane.set(xlim=(-0.15, 1.2), ylim=(-0.15, 1.2), aspect="equal", xlabel="along B", ylabel="across B")
    plane.set_title("dotted: key A; arrow: where it is written", fontsize="medium")
    overlaps = [write.overlap for write in result.writes]
    moves.plot(overlaps, overlaps, marker="o", markersize=4, color="C1", label="raw key (delta rule)")
    shown = [write.moves_b for write in result.writes]
    moves.plot(overlaps, shown, marker="o", markersize=4, color="C0", label="along u (Bayesian)")
    moves.set(xlabel="overlap of A and B", ylabel="B's read moves by, of A's")
    moves.legend(frameon=False, fontsize="small")
    save_figure(figure, path)
