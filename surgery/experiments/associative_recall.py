"""Multi-query associative recall: pairs of key and value in the context, then the keys again, each value to be told.

Keys come from the lower half of the vocabulary and values from the upper half. Queries follow the pairs; the gaps
between them are drawn from a power law (Arora et al., "Zoology", arXiv 2312.04927, Sec. 4). A query's answer is scored
at the key itself, and the place after it holds token 0, so that no answer is ever read. Three variants:

    base    key value key value ... then the queries
    update  the same; then a share of the keys once more, with new values, before the queries: the newest value counts
    block   keys and values in blocks, keys first, so that each value arrives later than its key
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.adaptation.losses import IGNORED
from surgery.errors import UsageError

TASKS = ("base", "update", "block")
EXPONENT = 0.01  # of the gaps' power law
BLOCK = 8  # keys of a block, before its values


@dataclass(frozen=True)
class AssociativeRecall:
    """A task of one size.

    Attributes:
        task: base, update or block.
        pairs: keys of a sequence.
        vocabulary: tokens; keys are 1 to vocabulary / 2 - 1, values the upper half.
        length: tokens of a sequence; None for the shortest, every other token a query.
        updated: share of the keys that ``update`` writes again.

    Raises:
        UsageError: the sizes do not fit each other.
    """

    task: str
    pairs: int
    vocabulary: int = 1024
    length: int | None = None
    updated: float = 0.5

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise UsageError(f"--task {self.task}: choose one of {', '.join(TASKS)}")
        if self.pairs < 1:
            raise UsageError(f"--pairs {self.pairs}: use 1 or more")
        needed = 2 * max(self.pairs + 1, self.pairs + self.rewritten)  # token 0 is no key
        if self.vocabulary < needed:
            raise UsageError(f"--vocabulary {self.vocabulary}: {self.pairs} pairs of {self.task} need {needed} tokens")
        if self.task == "update" and not 0 < self.rewritten <= self.pairs:
            raise UsageError(f"--updated {self.updated}: of {self.pairs} keys, a share that rewrites at least one")
        if self.length is not None and self.length < self.context + 2 * self.pairs:
            needed = self.context + 2 * self.pairs
            raise UsageError(f"--length {self.length}: {self.pairs} pairs and their queries need {needed} tokens")

    @property
    def rewritten(self) -> int:
        """Keys that are written a second time."""
        return round(self.updated * self.pairs) if self.task == "update" else 0

    @property
    def context(self) -> int:
        """Tokens before the first query."""
        return 2 * (self.pairs + self.rewritten)

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.length or self.context + 2 * self.pairs

    @property
    def answers(self) -> int:
        """Answers of a sequence."""
        return self.pairs

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw sequences on the generator's device.

        Returns:
            input_ids [count, tokens] int64 and targets of the same shape: a value at its queried key, ``IGNORED``
            everywhere else.
        """
        device, half = generator.device, self.vocabulary // 2

        def chosen(size: int, among: int) -> Tensor:
            """[count, size] distinct numbers below ``among``."""
            return torch.rand(count, among, generator=generator, device=device).topk(size, dim=1).indices

        keys = 1 + chosen(self.pairs, half - 1)
        values = half + chosen(self.pairs + self.rewritten, half)
        again = chosen(self.rewritten, self.pairs)
        new = values[:, self.pairs :]
        values = values[:, : self.pairs]
        ids = torch.zeros(count, self.tokens, dtype=torch.int64, device=device)
        if self.task == "block":
            pieces = zip(keys.split(BLOCK, dim=1), values.split(BLOCK, dim=1), strict=True)
            ids[:, : self.context] = torch.cat([part for piece in pieces for part in piece], dim=1)
        else:
            written = torch.cat((keys, keys.gather(1, again)), dim=1)
            held = torch.cat((values, new), dim=1)
            ids[:, : self.context] = torch.stack((written, held), dim=-1).flatten(1)
        newest = values.scatter(1, again, new)
        # the place of each key's query among those there are, without replacement and by the power law's weights
        places = (self.tokens - self.context) // 2
        weights = torch.arange(1, places + 1, dtype=torch.float32, device=device) ** (EXPONENT - 1)
        noise = torch.rand(count, places, generator=generator, device=device).clamp_(min=1e-20)
        order = (weights.log() - (-noise.log()).log()).topk(self.pairs, dim=1).indices
        at = self.context + 2 * order
        targets = torch.full_like(ids, IGNORED)
        return ids.scatter(1, at, keys), targets.scatter(1, at, newest)
