"""What each host and memory rule are to each other: the table that ``surgery hosts`` prints and the README holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from surgery.errors import UsageError
from surgery.memory.base import MemoryGeometry

if TYPE_CHECKING:
    from surgery.hosts.base import HostAdapter

RULES = ("palimpsa", "bayesian")
MIXERS = {"additive": "Mamba-2", "delta": "Gated DeltaNet"}


@dataclass(frozen=True)
class Support:
    """One host.

    Attributes:
        host: the adapter's name; model_type: the base's, None where its config.json has none.
        mixer: the layers whose memory can be swapped.
        rules: rule -> ``exact`` (dose 0 computes the host's function), ``approximate``, or ``refused: why``.
        checkpoints: examples.
        note: what of this family is refused, empty if nothing is.
    """

    host: str
    title: str
    model_type: str | None
    mixer: str
    rules: dict[str, str]
    checkpoints: tuple[str, ...]
    note: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def support() -> list[Support]:
    """Every host, in the order in which they were added."""
    from surgery.hosts import ADAPTERS

    return [
        Support(
            host=adapter.name,
            title=adapter.title,
            model_type=adapter.model_types[0],
            mixer="Kimi Delta Attention" if adapter.channel_decay else MIXERS[adapter.style],
            rules={rule: standing(adapter, rule) for rule in RULES},
            checkpoints=adapter.checkpoints,
            note=adapter.note,
        )
        for adapter in ADAPTERS
    ]


def standing(adapter: HostAdapter, rule: str) -> str:
    """What a rule is at dose 0 on a host, from the rule itself."""
    import torch

    from surgery.memory import create

    extra = {"channel_decay": True} if adapter.channel_decay else {}
    geometry = MemoryGeometry(adapter.style, 8, 2, 1, 4, 4, **extra)
    try:
        with torch.device("meta"):
            memory = create(rule, geometry)
    except (UsageError, ValueError) as error:
        return f"refused: {error}"
    return "exact" if memory.exact_limit else "approximate"


def markdown() -> str:
    """The table for the README."""
    lines = ["| host | `model_type` | swapped | Palimpsa | Bayesian | for example |", "|---|---|---|---|---|---|"]
    for row in support():
        kind = f"`{row.model_type}`" if row.model_type else "none (`ssm_cfg`)"
        cells = [row.title, kind, row.mixer, *(row.rules[rule] for rule in RULES), ", ".join(row.checkpoints)]
        lines.append("| " + " | ".join(cells) + " |")
    notes = [f"- {row.title}: {row.note}" for row in support() if row.note]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"
