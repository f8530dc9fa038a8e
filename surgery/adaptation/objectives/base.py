"""What every kind of phase says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.adaptation.distiller import Distiller
    from surgery.adaptation.teaching import Lesson
    from surgery.recipe import Phase


class Objective(ABC):
    """A kind of phase.

    Attributes:
        kind: its name in a recipe.
        teaches: whether a teacher, the base, reads the same tokens. A kind without one moves the student away from it.
        content: texts, of which every token is learned, or conversations, of which answers are.
        mixers_only: whether the loss reaches the swapped mixers alone, which then run on their teachers' inputs.
        options: keys of a phase that only some kinds take, with their defaults.
    """

    kind: ClassVar[str]
    teaches: ClassVar[bool] = False
    content: ClassVar[Literal["text", "instruct"]] = "text"
    mixers_only: ClassVar[bool] = False
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, **options: Any) -> None:
        if unknown := options.keys() - self.options.keys():
            raise TypeError(f"{self.kind} takes no {sorted(unknown)[0]}")
        self.values = {**self.options, **options}

    @classmethod
    def of(cls, phase: Phase) -> Objective:
        """The objective of a recipe's phase."""
        return cls(**{option: getattr(phase, option) for option in cls.options})

    @property
    def reads_residuals(self) -> bool:
        """Whether the loss compares the residual stream with the teacher's."""
        return False

    @abstractmethod
    def terms(self, layers: Sequence[int]) -> tuple[str, ...]:
        """The names of the loss's parts, given the swapped layers."""

    def weighted(self, terms: Sequence[float]) -> float:
        """The loss that its parts add up to."""
        return sum(terms)

    def counted(self, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens of a micro-batch that the loss is a mean over: all but padding."""
        import torch

        return mask.sum() if mask is not None else torch.tensor(targets.numel(), device=targets.device)

    @abstractmethod
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
        """One micro-batch's share of a step's loss, a scalar, and its parts before weighting.

        Args:
            distiller: student and teacher. batch: input_ids [B, T], and reset and mask [B, T] or None.
            targets: [B, T] int64. count, squares, lesson: see :meth:`surgery.adaptation.distiller.Distiller.forward`.
        """
