"""Learning from the tokens themselves: the text's next token, or a conversation's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surgery.adaptation.objectives.base import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.adaptation.distiller import Distiller


class NextToken(Objective):
    """Cross-entropy, mean over scored tokens."""

    kind = "next-token"

    def terms(self, layers: Sequence[int]) -> tuple[str, ...]:
        return ("cross_entropy",)

    def counted(self, targets: Tensor, mask: Tensor | None) -> Tensor:
        from surgery.adaptation.losses import IGNORED

        return (targets != IGNORED).sum()

    def parts(
        self, distiller: Distiller, batch: dict[str, Tensor | None], targets: Tensor, *, count: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor]:
        from surgery.adaptation.losses import cross_entropy

        student = distiller.student
        parts = (cross_entropy(student.run(**batch), targets, student.head) / count)[None]
        return parts.sum(), parts


class Instruct(NextToken):
    """The same on conversations, of which the data set scores answers only."""

    kind = "instruct"
    content = "instruct"
