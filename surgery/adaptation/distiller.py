"""The module that a phase trains: a batch in, the phase's loss out, term by term."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from surgery.adaptation import losses
from surgery.adaptation.teaching import Body, Lesson, Side

KINDS = ("hidden", "logits", "next-token", "instruct")


class _Enough(Exception):
    """Ends a forward pass after the last layer that is wanted."""


class Distiller(nn.Module):
    """A student, its teacher where the kind has one, and the loss between them.

    The kinds are

        hidden      each swapped mixer on its teacher's input: the relative L2 norm of the difference of outputs, mean
                    over tokens, summed over layers
        logits      T^2 KL from teacher to student at temperature T, mean over tokens, plus ``boundary_weight`` times
                    the sum over swapped layers of the mean squared difference of the residual stream after the block,
                    divided by the mean square of the teacher's
        next-token  cross-entropy, mean over scored tokens
        instruct    the same; the data set scores answers only

    Means are over a whole optimizer step: a call returns its micro-batch's share of them, so shares add up.

    Args:
        student: the model that is trained.
        kind: as above.
        teacher: a model of the teacher's own; None where the student's switches hold the teacher's mixers. For
            ``hidden`` its switches hold the student's mixers.
    """

    def __init__(
        self,
        student: Body,
        kind: str,
        *,
        teacher: Body | None = None,
        temperature: float = 1.0,
        boundary_weight: float = 1.0,
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r}")
        self.student, self.teacher, self.kind = student, teacher, kind
        self.temperature, self.boundary_weight = temperature, boundary_weight
        self.model = student.model
        if teacher is not None:
            self.teacher_model = teacher.model
        layers = list(student.mixers)
        self.terms: tuple[str, ...] = {
            "hidden": tuple(f"layer {layer}" for layer in layers),
            "logits": ("kl", *(f"boundary {layer}" for layer in layers)),
        }.get(kind, ("cross_entropy",))

    @property
    def runner(self) -> Body:
        """The model whose layers the student's mixers run in."""
        return self.teacher if self.kind == "hidden" and self.teacher is not None else self.student

    @property
    def has_boundaries(self) -> bool:
        """Whether the loss reads the residual stream."""
        return self.kind == "logits" and self.boundary_weight > 0

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
        if self.kind == "hidden":
            return self._match(batch, count)
        if self.kind == "logits":
            return self._distil(batch, count, squares, lesson or self.teach(**batch))
        hidden = self.student.run(**batch)
        total = losses.cross_entropy(hidden, targets, self.student.head)
        terms = (total / count)[None]
        return {"loss": terms.sum(), "terms": terms.detach()}

    def weighted(self, terms: list[float]) -> float:
        """The loss that ``terms`` add up to."""
        if self.kind == "logits":
            return terms[0] + self.boundary_weight * sum(terms[1:])
        return sum(terms)

    def counted(self, targets: Tensor, mask: Tensor | None = None, **_: Tensor) -> Tensor:
        """Tokens of a micro-batch that its loss counts: scored ones for cross-entropy, otherwise all but padding."""
        if self.kind in ("next-token", "instruct"):
            return (targets != losses.IGNORED).sum()
        return mask.sum() if mask is not None else torch.tensor(targets.numel(), device=targets.device)

    def teach(
        self, input_ids: Tensor, reset: Tensor | None = None, mask: Tensor | None = None, **_: Tensor
    ) -> Lesson:
        """The teacher's part of a micro-batch, without gradients."""
        body = self.teacher or self.student
        batch = {"input_ids": input_ids, "reset": reset, "mask": mask}
        with torch.no_grad(), body.turned(Side.TEACHER), body.residuals() as residuals:
            hidden = body.run(**batch)
        return Lesson(hidden, residuals if self.has_boundaries else {})

    def squares_of(self, lesson: Lesson, mask: Tensor | None) -> Tensor:
        """[layers]: the sum of squares of the teacher's residual stream after each swapped block."""
        return torch.stack([losses.squared(lesson.residuals[layer], mask) for layer in self.student.mixers])

    def _match(self, batch: dict[str, Tensor | None], count: Tensor) -> dict[str, Tensor]:
        switches = self.runner.switches
        last = switches[max(switches)]

        def stop(*_: object) -> None:
            raise _Enough

        handle = last.register_forward_hook(stop)
        try:
            with torch.no_grad(), self.runner.turned(Side.BOTH):
                self.runner.run(**batch)
        except _Enough:
            pass
        finally:
            handle.remove()
        parts = [losses.relative_l2(*switch.take(), batch["mask"]) for switch in switches.values()]
        terms = torch.stack(parts) / count
        return {"loss": terms.sum(), "terms": terms.detach()}

    def _distil(
        self, batch: dict[str, Tensor | None], count: Tensor, squares: Tensor | None, lesson: Lesson
    ) -> dict[str, Tensor]:
        mask = batch["mask"]
        with self.student.residuals() as residuals:
            hidden = self.student.run(**batch)
        divergence = losses.kl_divergence(
            hidden,
            lesson.hidden,
            self.student.head,
            (self.teacher or self.student).head,
            temperature=self.temperature,
            valid=mask,
        )
        kl = divergence / count
        if not self.has_boundaries:
            zeros = kl.new_zeros(len(self.terms) - 1)
            return {"loss": kl, "terms": torch.cat([kl.detach()[None], zeros])}
        if squares is None:
            squares = self.squares_of(lesson, mask)
        parts = [
            losses.squared_difference(residuals[layer], lesson.residuals[layer], mask) for layer in self.student.mixers
        ]
        boundaries = torch.stack(parts) / squares
        loss = kl + self.boundary_weight * boundaries.sum()
        return {"loss": loss, "terms": torch.cat([kl[None], boundaries]).detach()}
