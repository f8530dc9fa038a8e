"""The module that a phase trains: a batch in, the phase's loss out, term by term."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.adaptation import losses
from surgery.adaptation.objectives import Objective
from surgery.adaptation.teaching import Body, Lesson, Side


class Distiller(nn.Module):
    """A student, its teacher where the objective has one, and the loss between them.

    Means are over a whole optimizer step: a call returns its micro-batch's share of them, so shares add up.

    Args:
        student: the model that is trained.
        objective: the kind of phase.
        teacher: a model of the teacher's own; None where the student's switches hold the teacher's mixers. Where the
            loss reaches the mixers only, its switches hold the student's mixers.
    """

    def __init__(self, student: Body, objective: Objective, *, teacher: Body | None = None) -> None:
        super().__init__()
        self.student, self.teacher, self.objective = student, teacher, objective
        self.model = student.model
        if teacher is not None:
            self.teacher_model = teacher.model
        self.terms = objective.terms(list(student.mixers))

    @property
    def runner(self) -> Body:
        """The model whose layers the student's mixers run in."""
        return self.teacher if self.objective.mixers_only and self.teacher is not None else self.student

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        reset: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        count: Tensor,
        squares: Tensor | None = None,
        lesson: Lesson | None = None,
    ) -> dict[str, Tensor]:
        """One micro-batch.

        Args:
            input_ids, targets: [B, T] int64. reset: [B, T] bool. mask: [B, T] bool, False on padding, or None.
            count: tokens that the step's mean is over (:meth:`counted`, summed over the step's micro-batches).
            squares: [layers], the teacher's sum of squares of the residual stream, over the same tokens
                (:meth:`squares_of`, summed); None: this micro-batch is the whole step.
            lesson: the teacher's part, where it is at hand.

        Returns:
            ``loss``, a scalar, and ``terms`` [len(self.terms)], its parts before weighting.
        """
        batch = {"input_ids": input_ids, "reset": reset, "mask": mask}
        loss, parts = self.objective.parts(self, batch, targets, count=count, squares=squares, lesson=lesson)
        return {"loss": loss, "terms": parts.detach()}

    def counted(self, targets: Tensor, mask: Tensor | None = None, **_: Tensor) -> Tensor:
        """Tokens of a micro-batch that its loss counts."""
        return self.objective.counted(targets, mask)

    def teach(
        self, input_ids: Tensor, reset: Tensor | None = None, mask: Tensor | None = None, **_: Tensor
    ) -> Lesson:
        """The teacher's part of a micro-batch, without gradients."""
        body = self.teacher or self.student
        batch = {"input_ids": input_ids, "reset": reset, "mask": mask}
        with torch.no_grad(), body.turned(Side.TEACHER), body.residuals() as residuals:
            hidden = body.run(**batch)
        return Lesson(hidden, residuals if self.objective.reads_residuals else {})

    def squares_of(self, lesson: Lesson, mask: Tensor | None) -> Tensor:
        """[layers]: the sum of squares of the teacher's residual stream after each swapped block."""
        return torch.stack([losses.squared(lesson.residuals[layer], mask) for layer in self.student.mixers])
