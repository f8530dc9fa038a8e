"""The contract every memory rule keeps: inputs, state in and out, a dose from the host's rule to the full one.

Shapes, here and in the whole package:

    B  batch            T  tokens
    H  value heads      G  key heads, H % G == 0; value head h reads key head h // (H // G)
    K  key width        V  value width a head
    D  hidden width of the model
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from surgery.kernels import dispatch

HostStyle = Literal["additive", "delta"]


@dataclass(frozen=True)
class MemoryGeometry:
    """What a memory rule must know of the mixer that holds it.

    ``style`` names the host's own rule: ``additive`` (Mamba2: M = a M + dt x k^T) or ``delta`` (Gated DeltaNet:
    the decayed memory is corrected by the error of its prediction). ``negative_eigenvalues`` says that a delta host's
    write strength reaches 2 rather than 1 (fla's ``allow_neg_eigval``), ``channel_decay`` that a delta host decays
    each key channel on its own (Kimi Delta Attention): a_t is then a diagonal matrix on the key side.

    Raises:
        ValueError: an additive host with a decay for each key channel.
    """

    style: HostStyle
    hidden_size: int  # D
    num_heads: int  # H
    num_key_heads: int  # G
    key_dim: int  # K
    value_dim: int  # V
    negative_eigenvalues: bool = False
    channel_decay: bool = False

    def __post_init__(self) -> None:
        if self.channel_decay and self.style != "delta":
            raise ValueError("channel_decay: only delta hosts decay each key channel on its own")


@dataclass(frozen=True)
class MemoryInputs:
    """One call's inputs, as the host's mixer makes them: after its convolutions, its normalisation and scaling of
    keys and queries, and its gates.

    Attributes:
        hidden: [B, T, D], the mixer's input, from which a rule may project gates of its own.
        q, k: [B, T, G, K]. v: [B, T, H, V], before the write strength is applied.
        log_decay: [B, T, H] float32, g = log a <= 0; [B, T, H, K] where the geometry has ``channel_decay``.
        write: [B, T, H] float32, the write strength: dt on an additive host (the write is dt v k^T), eta on a delta
            host.
        mask: [B, T] bool or None, False on padding. Padding leaves the state exactly as it was.
        reset: [B, T] bool or None, True on the first token of a document: the state returns to its initial value
            before that token.
        in_place: whether the state given beside may be overwritten with the one returned.
    """

    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    write: Tensor
    mask: Tensor | None = None
    reset: Tensor | None = None
    in_place: bool = False

    def span(self, tokens: slice) -> MemoryInputs:
        """Return the inputs of some of the tokens."""
        cut = {name: x[:, tokens] for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **cut)

    def masked(self) -> MemoryInputs:
        """The same inputs with padding turned into the identity on an additive or delta state."""
        if self.mask is None:
            return self
        token = self.mask[..., None]
        vector = token[..., None]
        return replace(
            self,
            k=self.k * vector.to(self.k.dtype),
            v=self.v * vector.to(self.v.dtype),
            log_decay=self.log_decay.masked_fill(~(vector if self.log_decay.ndim == 4 else token), 0.0),
            write=self.write.masked_fill(~token, 0.0),
        )


class MemoryRule(nn.Module):
    """A memory rule inside a mixer. Subclasses add their parameters and implement :meth:`forward`.

    The buffer ``dose`` in [0, 1] stands between the host's rule (0, exactly, where ``exact_limit``) and the full rule
    (1). Every added parameter acts through it. It is persistent and stays float32, whatever the module is cast to.
    """

    rule: ClassVar[str]  # the recipe's name for it
    # The recipe's options, and what each means where nothing names it. Checkpoints and recipes rest on these meanings,
    # so they never change: a better choice goes into the recipes that ship or are drafted, which name every option.
    defaults: ClassVar[dict[str, Any]] = {}
    paper_defaults: ClassVar[dict[str, Any]] = {}  # those that differ under `start: paper`

    def __init__(self, geometry: MemoryGeometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.options: dict[str, Any] = {}  # all of the rule's options as they are in force, plain JSON values
        self.register_buffer("dose", torch.zeros((), dtype=torch.float32))

    @property
    def exact_limit(self) -> bool:
        """Whether dose 0 computes the host's own rule exactly."""
        raise NotImplementedError

    def state_shape(self, batch: int) -> tuple[int, ...]:
        """Shape of the packed float32 state for ``batch`` sequences; the batch is always dimension 0."""
        raise NotImplementedError

    def reset_parameters(self, start: Literal["exact", "paper"] = "exact") -> None:
        """Set the added parameters and the dose to their initial values (draws from torch's global generator).

        Args:
            start: ``exact`` is dose 0; ``paper`` is dose 1, the full rule. The parameters' starts are each rule's own,
                and its docstring says which of them a paper gives.
        """
        raise NotImplementedError

    def forward(self, inputs: MemoryInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the rule. Returns outputs [B, T, H, V] in v's dtype and the packed state after the last token."""
        raise NotImplementedError

    def read_variance(self, inputs: MemoryInputs, state: Tensor | None = None) -> Tensor:
        """Return the variance of each read, [B, T, H, V]: how unsure the rule is of what :meth:`forward` gives for the
        same arguments. Of padding it means nothing.

        :func:`surgery.graft.read_variances` asks a whole model for it.

        Raises:
            NotImplementedError: the rule keeps no measure of its uncertainty.
        """
        raise NotImplementedError(f"the {self.rule} rule keeps no measure of its uncertainty")

    def compiles(self, device: torch.device) -> bool:
        """Whether torch.compile is to look into :meth:`forward` on ``device``: where its kernels are single operators,
        and not loops over chunks, which would take minutes to compile."""
        return not self.geometry.channel_decay and dispatch.picked(self.rule, device) == "triton"

    def diagnostics(self, state: Tensor) -> dict[str, Tensor]:
        """Figures a packed state shows, each [H] float32; none for a rule that carries the host's state alone."""
        return {}

    def write_diagnostics(self, inputs: MemoryInputs, state: Tensor | None) -> dict[str, Tensor]:
        """Figures of the write of a call's first token into the state before it, each [H] float32, mean over the batch;
        none for a rule whose writes do not depend on its state."""
        return {}

    def _apply(self, fn, recurse: bool = True):
        """Casts leave the dose and the rule's parameters in float32: they are few, and bf16 would move the limit."""
        # a cast replaces a parameter's data in place, so keep the data and not the parameter
        kept = {name: tensor.detach() for name, tensor in self._float32_tensors()}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            module, _, leaf = name.rpartition(".")
            owner = self.get_submodule(module) if module else self
            after = getattr(owner, leaf)
            if after.dtype != torch.float32:
                after.data = before.to(after.device)
        return self

    def _float32_tensors(self):
        """Names and tensors that must never be cast. Subclasses extend it."""
        yield "dose", self.dose
