"""Palimpsa: every element of the memory carries its own precision, which guards what has been written often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from surgery.errors import UsageError
from surgery.kernels import dispatch

from .base import MemoryGeometry, MemoryInputs, MemoryRule
from .modules import in_dtype_of

CHANNELS = 8  # key channels run at once where each has a decay of its own; the working memory grows with it


class Palimpsa(MemoryRule):
    """Palimpsa's rule with the host's keys, queries, values, decay and write strength w (dt, or a delta host's eta).

        M_t = a_t M_{t-1} + (w_t v_t) k_t^T    E_t = a_t E_{t-1} + b_t (k_t^2)^T    o_t = (M_t / (I0^d + E_t)) q_t
        b_t = d sigmoid(b_proj b_rank_proj h_t) softplus(b_scale) w_t               d: the dose

    Source: the Palimpsa paper, Eq. (5) and Appendix A.12, in natural parameters. The paper asks for b_t >= 0 per value
    channel; its form above, the names of the parameters, their starts and I0 = 1 are this project's choice.

    Dose 0 is the additive rule: on an additive host the host's own, exactly. On a delta host nothing erases, so there
    is no exact limit.

    Parameters, beside the dose:
        b_rank_proj.weight [rank, D], b_proj.weight [H V, rank]: the precision gate, low rank; normal, deviation 0.02,
            so that the gate starts near 1/2 everywhere. These two follow the module's dtype; the others stay float32.
        b_scale [H]: uniform in the option ``b_scale``, by default the paper's range for fine-tuning.
        Ip_log [H]: log I0, 0 (a prior precision of one); a buffer unless ``learn_prior``.

    Every element of M and E has a history of its own, so a decay for each key channel needs no other rule, only more
    work: a layer is run a few channels at a time.

    State: M beside E, [B, 2, H, V, K].

    Args:
        rank: rank of the precision gate; None for D / 16.
        b_scale: lowest and highest start of the raw b_scale.
        learn_prior: whether Ip_log is trained.

    Raises:
        UsageError: an option's value is not of that kind.
    """

    rule = "palimpsa"
    defaults = {"rank": None, "b_scale": [0.1, 1.0], "learn_prior": False}  # noqa: RUF012 (declared in the base)

    def __init__(
        self,
        geometry: MemoryGeometry,
        *,
        rank: int | None = None,
        b_scale: Sequence[float] = (0.1, 1.0),
        learn_prior: bool = False,
    ) -> None:
        super().__init__(geometry)
        if rank is None:
            rank = max(1, geometry.hidden_size // 16)
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise UsageError(f"memory.rank: {rank!r} is not a whole number above 0")
        if not _is_range(b_scale):
            raise UsageError(f"memory.b_scale: {b_scale!r} is not [lowest, highest], two finite numbers in order")
        if not isinstance(learn_prior, bool):
            raise UsageError(f"memory.learn_prior: {learn_prior!r} is neither true nor false")
        self.b_scale_range = (float(b_scale[0]), float(b_scale[1]))
        self.options = {"rank": rank, "b_scale": list(self.b_scale_range), "learn_prior": learn_prior}
        heads = geometry.num_heads
        self.b_rank_proj = nn.Linear(geometry.hidden_size, rank, bias=False)
        self.b_proj = nn.Linear(rank, heads * geometry.value_dim, bias=False)
        self.b_scale = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        prior = torch.empty(heads, dtype=torch.float32)
        if learn_prior:
            self.Ip_log = nn.Parameter(prior)
        else:
            self.register_buffer("Ip_log", prior)
        self.reset_parameters()

    @property
    def exact_limit(self) -> bool:
        return self.geometry.style == "additive"

    def state_shape(self, batch: int) -> tuple[int, ...]:
        geometry = self.geometry
        return batch, 2, geometry.num_heads, geometry.value_dim, geometry.key_dim

    @torch.no_grad()
    def reset_parameters(self, start: Literal["exact", "paper"] = "exact") -> None:
        for projection in (self.b_rank_proj, self.b_proj):
            nn.init.normal_(projection.weight, std=0.02)
        self.b_scale.uniform_(*self.b_scale_range)
        self.Ip_log.zero_()
        self.dose.fill_(0.0 if start == "exact" else 1.0)

    def forward(self, inputs: MemoryInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        given = self._given(inputs)
        if self.geometry.channel_decay:
            return _by_channel(*given, state=state, reset=inputs.reset)
        return dispatch.palimpsa(*given, state=state, reset=inputs.reset, in_place=inputs.in_place)

    def read_variance(self, inputs: MemoryInputs, state: Tensor | None = None) -> Tensor:
        """The variance of each read, [B, T, H, V]: sum_j q_j^2 / I_ij for value channel i, I = I0^d + E the precision
        after the token's write. At dose 0 it is |q|^2, since nothing has been learned of the memory's certainty.

        Source: the readout of the Palimpsa paper's posterior, of diagonal precision I.
        """
        given = self._given(inputs)
        if self.geometry.channel_decay:
            return _by_channel(*given, state=state, reset=inputs.reset, return_variance=True)[1]
        return dispatch.palimpsa(*given, state=state, reset=inputs.reset, return_variance=True)[1]

    def _given(self, inputs: MemoryInputs) -> tuple[Tensor, ...]:
        """What the kernels are given: q, k, the write, b, the log decay and the prior."""
        inputs = inputs.masked()
        v, write = inputs.v, inputs.write[..., None]
        gate = self.b_proj(self.b_rank_proj(in_dtype_of(self.b_rank_proj, inputs.hidden)))
        gate = torch.sigmoid(gate.to(write.dtype)).unflatten(-1, v.shape[-2:])
        strength = self.dose * F.softplus(self.b_scale)
        # the write strength is float32, which would make half precision values float32, and the kernels slow
        written, b = (x.to(v.dtype) for x in (v * write, gate * strength[:, None] * write))
        return inputs.q, inputs.k, written, b, inputs.log_decay, self._prior()

    def diagnostics(self, state: Tensor) -> dict[str, Tensor]:
        """``importance_spread``: r = (I_max - I_min) / I_min over a head's elements, mean over the batch.

        Source: the Palimpsa paper, Fig. 3. 0 where all elements are equally important.
        """
        importance = self._prior()[:, None, None] + state[:, 1]
        least = importance.amin((-2, -1))
        return {"importance_spread": ((importance.amax((-2, -1)) - least) / least).mean(0).float()}

    def _prior(self) -> Tensor:
        return (self.dose * self.Ip_log).exp()  # I0^d

    def _float32_tensors(self):
        yield from super()._float32_tensors()
        yield "b_scale", self.b_scale
        yield "Ip_log", self.Ip_log


def _by_channel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    *,
    state: Tensor | None,
    reset: Tensor | None,
    return_variance: bool = False,
) -> tuple[Tensor, ...]:
    """Palimpsa with decays [B, T, H, K]: each key channel is a head of key width 1, and their outputs add up, their
    variances as well."""
    heads, key_dim = log_decay.shape[-2:]
    q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    totals, states = (0.0,) * (1 + return_variance), []
    for start in range(0, key_dim, CHANNELS):
        here = slice(start, min(start + CHANNELS, key_dim))
        before = None if state is None else state[..., here]
        given = q[..., here], k[..., here], v, b, log_decay[..., here], prior, before, reset
        run = partial(_channels, *given, return_variance)
        # kept for the backward pass, the channels' outputs would be K times the layer's
        *outputs, after = checkpoint(run, use_reentrant=False) if torch.is_grad_enabled() else run()
        totals = tuple(total + output for total, output in zip(totals, outputs, strict=True))
        states.append(after)
    o, *variance = totals
    return o.to(v.dtype), *variance, torch.cat(states, dim=-1)


def _channels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    log_decay: Tensor,
    prior: Tensor,
    state: Tensor | None,
    reset: Tensor | None,
    return_variance: bool,
) -> tuple[Tensor, ...]:
    """Outputs (and variances), added up in float32, and state of some channels: q, k, log_decay [B, T, H, J], state
    [B, 2, H, V, J]."""
    share = q.shape[-1]
    q, k = (x.flatten(2)[..., None] for x in (q, k))
    v, b = (x.repeat_interleave(share, dim=2) for x in (v, b))
    if state is not None:
        state = state.movedim(-1, 3).flatten(2, 3)[..., None]
    # torch's form everywhere: the Triton kernels have never run on a GPU with keys this narrow
    *outputs, state = dispatch.palimpsa(
        q, k, v, b, log_decay.flatten(2), prior.repeat_interleave(share), state=state, reset=reset,
        return_variance=return_variance, backend="reference" if v.shape[1] == 1 else "chunked",
    )
    outputs = [x.unflatten(2, (-1, share)).sum(3, dtype=torch.promote_types(x.dtype, torch.float32)) for x in outputs]
    return *outputs, state[..., 0].unflatten(2, (-1, share)).movedim(3, -1)


def _is_range(value: object) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return False
    if not all(isinstance(end, (int, float)) and not isinstance(end, bool) and math.isfinite(end) for end in value):
        return False
    return value[0] <= value[1]
