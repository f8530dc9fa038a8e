"""Distillation: the teacher's distribution of the next token, and its residual stream after each swapped block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from surgery.adaptation.objectives.base import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.adaptation.distiller import Distiller
    from surgery.adaptation.teaching import Lesson


class Logits(Objective):
    """T^2 KL from teacher to student at temperature T, mean over tokens, plus ``boundary_weight`` times the sum over
    swapped layers of the mean squared difference of the residual stream after the block, divided by the mean square of
    the teacher's."""

    kind = "logits"
    teaches = True
    options: ClassVar[dict[str, Any]] = {"temperature": 1.0, "boundary_weight": 1.0}

    @property
    def reads_residuals(self) -> bool:
        return self.values["boundary_weight"] > 0

    def terms(self, layers: Sequence[int]) -> tuple[str, ...]:
        return ("kl", *(f"boundary {layer}" for layer in layers))

    def weighted(self, terms: Sequence[float]) -> float:
        return terms[0] + self.values["boundary_weight"] * sum(terms[1:])

    def parts(
        self,
        distiller: Distiller,
        batch: dict[str, Tensor | None],
        targets: Tensor,
        *,
        count: Tensor,
        squares: Tensor | None,
        lesson: Lesson | None,
    ) -> tuple[Tensor, Tensor]:
        import torch

        from surgery.adaptation.losses import kl_divergence, squared_difference

        student, mask = distiller.student, batch["mask"]
        lesson = lesson or distiller.teach(**batch)
        with student.residuals() as residuals:
            hidden = student.run(**batch)
        divergence = kl_divergence(
            hidden,
            lesson.hidden,
            student.head,
            (distiller.teacher or student).head,
            temperature=self.values["temperature"],
            valid=mask,
        )
        kl = divergence / count
        if not self.reads_residuals:
            return kl, torch.cat([kl[None], kl.new_zeros(len(student.mixers))])
        if squares is None:
            squares = distiller.squares_of(lesson, mask)
        differences = [
            squared_difference(residuals[layer], lesson.residuals[layer], mask) for layer in student.mixers
        ]
        boundaries = torch.stack(differences) / squares
        return kl + self.values["boundary_weight"] * boundaries.sum(), torch.cat([kl[None], boundaries])
