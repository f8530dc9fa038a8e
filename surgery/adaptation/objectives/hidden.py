"""Hidden-state matching: each swapped mixer on its teacher's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surgery.adaptation.objectives.base import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.adaptation.distiller import Distiller


class _Enough(Exception):
    """Ends a forward pass after the last layer that is wanted."""


class Hidden(Objective):
    """The relative L2 norm of the difference of a mixer's and its teacher's outputs, mean over tokens, summed over
    swapped layers."""

    kind = "hidden"
    teaches = True
    mixers_only = True

    def terms(self, layers: Sequence[int]) -> tuple[str, ...]:
        return tuple(f"layer {layer}" for layer in layers)

    def parts(
        self, distiller: Distiller, batch: dict[str, Tensor | None], targets: Tensor, *, count: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor]:
        import torch

        from surgery.adaptation.losses import relative_l2
        from surgery.adaptation.teaching import Side

        switches = distiller.runner.switches
        last = switches[max(switches)]

        def stop(*_: object) -> None:
            raise _Enough

        handle = last.register_forward_hook(stop)
        try:
            with torch.no_grad(), distiller.runner.turned(Side.BOTH):
                distiller.runner.run(**batch)
        except _Enough:
            pass
        finally:
            handle.remove()
        parts = torch.stack([relative_l2(*switch.take(), batch["mask"]) for switch in switches.values()]) / count
        return parts.sum(), parts
