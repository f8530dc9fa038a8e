"""How much an upgraded layer still learns: the gain of its writes at places along a text.

A write's gain is the share of a read's error that it removes at its own key; see ``write_diagnostics`` of the memory
rules. With restoring noise it falls as a memory becomes certain: at full retention and a long horizon N, a key that is
written again and again has a gain of about sqrt(2 / N) where the host's is one half. The layers that remember longest
then hardly learn any more.
"""

from __future__ import annotations

from torch import nn

from surgery.memory.base import MemoryInputs

WRITES = 16  # tokens whose writes are tried at each place


class GainMeter:
    """The gains of one layer's writes, a head, at every place where a call begins."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.figures: dict[str, list[list[float]]] = {}

    def add(self, memory: nn.Module, inputs: MemoryInputs, state: object, before: int) -> None:
        """Try the writes of a call's first tokens, each into the ``state`` before the call, ``before`` tokens into the
        text; figures are means over them."""
        count = min(WRITES, inputs.v.shape[1])
        tried = [memory.write_diagnostics(inputs.span(slice(token, token + 1)), state) for token in range(count)]
        if not tried[0]:
            return
        self.tokens.append(before)
        for name in tried[0]:
            mean = sum(one[name].double() for one in tried) / count
            self.figures.setdefault(name, []).append(mean.tolist())

    def last(self) -> dict[str, list[float]]:
        """Return the figures at the last place, a head, by name; none for a rule whose writes do not depend on its
        state."""
        return {name: places[-1] for name, places in self.figures.items()}

    def along(self) -> dict[str, list[float]] | None:
        """Return the places under ``tokens`` and each figure's mean over the heads there; None without figures."""
        if not self.tokens:
            return None
        means = {name: [sum(heads) / len(heads) for heads in places] for name, places in self.figures.items()}
        return {"tokens": [float(place) for place in self.tokens], **means}


def cuts(tokens: int, segment: int, gains: bool) -> list[int]:
    """Return where the calls on a text begin: a call per segment and, for ``gains``, one for the last writes."""
    starts = list(range(0, tokens, segment))
    if gains and tokens - starts[-1] > WRITES:
        starts.append(tokens - WRITES)
    return starts
