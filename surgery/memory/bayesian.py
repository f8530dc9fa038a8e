"""The Bayesian Layer: a memory that propagates the covariance of what it knows, and writes where it is unsure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.errors import UsageError
from surgery.kernels import dispatch

from .base import MemoryGeometry, MemoryInputs, MemoryRule
from .noise import affine_scan, bounded
from .rotations import phases, turn, turn_state

# the observation noise is at least this part of the largest variance, less what enters as process noise
NOISE_FLOOR = 1e-4
# below it a write strength changes nothing, while 1 / eta and its gradient leave float32
SMALLEST_STRENGTH = 1e-12


class _Scalars(NamedTuple):
    """The lowered recurrence's scalars, [B, T, L] for L = H Gn memories, and x [L]; the first three are [B, T, L, K]
    where the host decays each key channel on its own."""

    decay: Tensor
    cov_decay_sqrt: Tensor
    process_noise: Tensor
    precision: Tensor
    observation_noise: Tensor
    erase: Tensor
    shrink: Tensor
    write: Tensor


class Bayesian(MemoryRule):
    """The Bayesian Layer with the host's keys, queries, values and decay a_t. With d the dose and rho the retention,

        c_t = d rho a_t^2        Pbar_t = c_t P_{t-1} + n_t I        u_t = Pbar_t k_t

    On a delta host with write strength eta, r2 = 1/eta - |k|^2 (above 0 and the floor) and, where eta |k|^2 > 1,
    omega = eta |k|^2 and theta = omega (2 - omega); both are 1 elsewhere:

        beta_t = 1 / (r2_t + k_t.u_t)
        M_t = a_t M_{t-1} + omega beta_t u_t (v_t - a_t M_{t-1}^T k_t)^T        P_t = Pbar_t - theta beta_t u_t u_t^T

    On an additive host with write strength dt, s_t = c_t s_{t-1} + n_t from p0 (P without any observation) and
    lambda_t = d lambda:

        b_t = 1 / (1 + lambda k_t.u_t)        P_t = Pbar_t - lambda b_t u_t u_t^T
        M_t = a_t M_{t-1} + (b_t / s_t) u_t ((1 + lambda s_t |k_t|^2) dt_t v_t - lambda s_t a_t M_{t-1}^T k_t)^T

    Both read o_t = M_t^T q_t, and at dose 0 both are the host's rule: there c = 0, n = 1, lambda = 0.
    Source: "Memory by Design: Probabilistic Sequence Layers", Proposition 1 (rho = 1, constant noise, c_t = a_t^2). The
    retention, the restoring noise and the additive form are this project's, and so is every start: the paper gives
    none but those of its collision experiment (p0 = 3, r2 = l2 = 0.05).

    Where the host decays each key channel on its own, a_t and c_t are diagonal matrices: Pbar_t = d rho a_t P a_t +
    diag(n_t), and restoring noise is nu (I - d rho a_t^2); the paper's diag(a) P diag(a) at rho = 1.

    Noise. ``restoring``: n_t = nu (1 - c_t) and p0 = nu, so that forgetting returns P to its prior and P <= nu I.
    ``constant``: n_t = l2, added as the paper adds its l_t^2, and a p0 of its own.

    The paper's l_t^2 depends on the token. ``noise_from: token`` learns a map to it from the mixer's input h_t:

        log nu_t = bound(log_nu + w.h_t / sqrt D)        bound(x) = x / sqrt(1 + (x / ln 1e4)^2)

    and likewise log l2_t. The bound is smooth and keeps a gradient on both sides, and both noises lie between 1e-4 and
    1e4. Division by sqrt D lets a step of the optimiser move the noise about as far at every width. The largest
    variance without any observation, s_t = c_t s_{t-1} + n_t from s_0 = p0, bounds P_t <= s_t I. It no longer follows
    from the parameters, so it is carried with the state.

    Parameters, float32, one for each head and noise group, beside the dose. What only rescales P is left out: M depends
    on the ratio of process to observation noise alone. On a delta host the observation noise comes from the host's own
    write gate, which stays trainable, and the ratio from nu or l2; on an additive host nu = l2 = 1 and it is lambda.
        log_nu [L]: delta, restoring. Acts as 1 + d (nu - 1); starts at 0, the host's unit prior. p0 is this nu, without
            the token's part.
        log_l2 [L]: delta, constant. Acts as 1 + d (l2 - 1); starts at 0 (this project's choice).
        log_p0 [L]: constant, unless the retention is 0 (then p0 acts on nothing). Acts as 1 + d (p0 - 1); starts at 0
            (this project's choice).
        noise_proj [L, D]: noise from the token, w above. Starts at 0, which is one noise per head. On an
            additive host log_nu and log_l2 are 0, since they would only rescale P.
        log_lambda [L]: additive. Acts as d lambda; starts at -log K, so that lambda |k|^2 is about 1 for keys with
            entries of unit size (this project's choice).
        rotation [G, K / 2]: rotations, the angles in radians a token, one for each pair of a key head's channels. Acts
            as d rotation; starts at 0.

    Rotations. With ``rotations`` the decays are damped rotations, A_t = a_t R, and sqrt c_t R on both sides of P, where
    R turns each pair of key channels (2i, 2i + 1) by d times an angle of its own; the paper's Appendix D names them and
    gives no form, so this one is the project's. See :mod:`surgery.memory.rotations`.

    State: the mean beside the covariance, [B, L, K, V / Gn + K]; with constant noise or noise from the token one column
    more, filled with s (its diagonal, where a host decays by channel).

    Args:
        noise: ``restoring`` or ``constant``.
        noise_from: ``head``, one noise per head, or ``token``, a noise that each token's input sets.
        retention: rho in [0, 1], fixed.
        noise_groups: Gn, a divisor of V: each group of a head's value channels has its own noise and covariance.
        rotations: whether decays rotate as well.

    Raises:
        UsageError: an option's value is not of that kind, or the host's keys cannot rotate.
    """

    rule = "bayesian"
    defaults = {  # noqa: RUF012 (declared in the base)
        "noise": "restoring",
        "noise_from": "head",
        "retention": 1.0,
        "noise_groups": 1,
        "rotations": False,
    }
    paper_defaults = {"noise": "constant"}  # noqa: RUF012

    def __init__(
        self,
        geometry: MemoryGeometry,
        *,
        noise: Literal["restoring", "constant"] = "restoring",
        noise_from: Literal["head", "token"] = "head",
        retention: float = 1.0,
        noise_groups: int = 1,
        rotations: bool = False,
    ) -> None:
        super().__init__(geometry)
        if noise not in ("restoring", "constant"):
            raise UsageError(f"memory.noise: {noise!r} is neither restoring nor constant")
        if noise_from not in ("head", "token"):
            raise UsageError(f"memory.noise_from: {noise_from!r} is neither head nor token")
        if not isinstance(retention, (int, float)) or isinstance(retention, bool) or not 0 <= retention <= 1:
            raise UsageError(f"memory.retention: {retention!r} is not a number from 0 to 1")
        if not isinstance(noise_groups, int) or isinstance(noise_groups, bool) or noise_groups < 1:
            raise UsageError(f"memory.noise_groups: {noise_groups!r} is not a whole number above 0")
        if geometry.value_dim % noise_groups:
            raise UsageError(f"memory.noise_groups: {noise_groups} does not divide the values' {geometry.value_dim}")
        if not isinstance(rotations, bool):
            raise UsageError(f"memory.rotations: {rotations!r} is neither true nor false")
        if rotations and (geometry.channel_decay or geometry.key_dim % 2):
            why = "decays each key channel on its own" if geometry.channel_decay else "has keys of an odd width"
            raise UsageError(f"memory.rotations: true turns pairs of key channels alike; this host {why}: use false")
        self.noise = noise
        self.noise_from = noise_from
        self.retention = float(retention)
        self.noise_groups = noise_groups
        self.rotations = rotations
        self.options = {
            "noise": noise, "noise_from": noise_from, "retention": self.retention, "noise_groups": noise_groups,
            "rotations": rotations,
        }  # fmt: skip
        names = []
        if geometry.style == "additive":
            names.append("log_lambda")
        else:
            names.append("log_nu" if noise == "restoring" else "log_l2")
        if noise == "constant" and retention > 0:
            names.append("log_p0")
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(self._memories, dtype=torch.float32)))
        self._names = tuple(names)
        if noise_from == "token":
            self.noise_proj = nn.Parameter(torch.empty(self._memories, geometry.hidden_size, dtype=torch.float32))
        if rotations:
            shape = geometry.num_key_heads, geometry.key_dim // 2
            self.rotation = nn.Parameter(torch.empty(shape, dtype=torch.float32))
        self.reset_parameters()

    @property
    def exact_limit(self) -> bool:
        return True

    @property
    def _memories(self) -> int:
        return self.geometry.num_heads * self.noise_groups

    @property
    def _value_dim(self) -> int:
        return self.geometry.value_dim // self.noise_groups

    @property
    def _carries_bound(self) -> bool:
        """Whether the state holds s_t, which otherwise follows from the parameters."""
        return self.noise == "constant" or self.noise_from == "token"

    def state_shape(self, batch: int) -> tuple[int, ...]:
        key_dim = self.geometry.key_dim
        return batch, self._memories, key_dim, self._value_dim + key_dim + self._carries_bound

    @torch.no_grad()
    def reset_parameters(self, start: Literal["exact", "paper"] = "exact") -> None:
        for name in self._names:
            start_value = -math.log(self.geometry.key_dim) if name == "log_lambda" else 0.0
            getattr(self, name).fill_(start_value)
        if self.noise_from == "token":
            self.noise_proj.zero_()
        if self.rotations:
            self.rotation.zero_()
        self.dose.fill_(0.0 if start == "exact" else 1.0)

    def forward(self, inputs: MemoryInputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        o, state, unobserved, turned = self._run(inputs, state)
        if turned is not None:
            state = turn_state(state, turned, self._value_dim)
        if unobserved is not None:
            column = unobserved if self.geometry.channel_decay else unobserved[..., None]
            column = column[..., None].expand(*state.shape[:-1], 1)
            state = torch.cat((state, column.to(state.dtype)), dim=-1)
        return o.reshape(inputs.v.shape).to(inputs.v.dtype), state

    def read_variance(self, inputs: MemoryInputs, state: Tensor | None = None) -> Tensor:
        """The variance of each read, [B, T, H, V]: q_t.P_t q_t after the token's write, the same for all channels of a
        noise group. It is of the design model, with observation noise r2_t (on an additive host 1 / lambda) and prior
        p0; the paper's layer does not use it. At dose 0, which remembers nothing of P, it is that of one write into I.
        """
        _, variance, *_ = self._run(replace(inputs, in_place=False), state, return_variance=True)
        width = self._value_dim
        return variance[..., None].expand(*variance.shape, width).reshape(inputs.v.shape)

    def _run(self, inputs: MemoryInputs, state: Tensor | None, **options: bool) -> tuple[Tensor | None, ...]:
        """What the kernels return for ``options``, s after the last token and how far the state has still to turn."""
        masked, turned = self._turned(inputs.masked())
        q, k, v = masked.q, masked.k, masked.v
        dtype = torch.promote_types(v.dtype, torch.float32)
        state, unobserved = self._unpack(state, v.shape[0], dtype)
        scalars, unobserved = self._lower(masked, unobserved, dtype)
        if self.geometry.style == "additive":
            v = v * masked.write[..., None]
        found = dispatch.bayesian(
            q, k, v.reshape(*v.shape[:2], self._memories, self._value_dim), *scalars,
            state=state, initial_covariance=self._prior(dtype), unit_gain=not self.geometry.negative_eigenvalues,
            in_place=inputs.in_place, **options,
        )
        return *found, unobserved, turned

    def _turned(self, inputs: MemoryInputs) -> tuple[MemoryInputs, Tensor | None]:
        """The inputs with keys and queries turned back, and how far each memory has turned after the last token,
        [B, L, K / 2]; as they are, and None, without rotations."""
        if not self.rotations:
            return inputs, None
        batch, tokens = inputs.v.shape[:2]
        phase = phases(self.dose.double() * self.rotation.double(), tokens, inputs.mask)
        last = phase[:, -1].expand(batch, -1, -1)
        last = self._spread(last.repeat_interleave(self.geometry.num_heads // last.shape[1], dim=1), 1)
        return replace(inputs, q=turn(inputs.q, -phase), k=turn(inputs.k, -phase)), last

    def diagnostics(self, state: Tensor, log_decay: Tensor | None = None) -> dict[str, Tensor]:
        """``covariance_condition``: the condition of the covariance predicted for the next token, by its largest and
        smallest eigenvalue, mean over the batch and a head's groups.

        Args:
            log_decay: [B, H] or, decaying by channel, [B, H, K], the next token's; None for a token that forgets
                nothing.
        """
        dtype = state.dtype
        start = self._value_dim
        covariance = state[..., start : start + self.geometry.key_dim]
        shape = (self.geometry.num_heads, *([self.geometry.key_dim] if self.geometry.channel_decay else []))
        g = state.new_zeros(state.shape[0], *shape) if log_decay is None else log_decay.to(dtype)
        _, c_sqrt, noise = self._prediction(g, self._noise(None, dtype), dtype)
        if self.geometry.channel_decay:
            predicted = c_sqrt[..., :, None] * covariance * c_sqrt[..., None, :] + torch.diag_embed(noise)
            values = torch.linalg.eigvalsh(predicted)
        else:
            values = c_sqrt.square()[..., None] * torch.linalg.eigvalsh(covariance) + noise[..., None]
        smallest = values[..., 0].clamp(min=torch.finfo(dtype).tiny)
        condition = (values[..., -1] / smallest).unflatten(1, (-1, self.noise_groups))
        return {"covariance_condition": condition.mean((0, 2)).float()}

    def write_diagnostics(self, inputs: MemoryInputs, state: Tensor | None) -> dict[str, Tensor]:
        """``gain``: the share of a read's error that the write removes at its own key, p h k.u. It lies between 0 and
        the larger of 1 and eta |k|^2; the figure is the mean over the batch and a head's groups. ``host_gain``: the
        same at dose 0, eta |k|^2 on a delta host and 0 on an additive one, which erases nothing. Where the gain is far
        below the host's, the layer hardly learns any more."""
        masked, _ = self._turned(inputs.span(slice(0, 1)).masked())
        dtype = torch.promote_types(masked.v.dtype, torch.float32)
        before, unobserved = self._unpack(state, masked.v.shape[0], dtype)
        scalars, _ = self._lower(masked, unobserved, dtype)
        k = masked.k[:, 0].to(dtype)
        k = self._spread(k.repeat_interleave(self.geometry.num_heads // k.shape[1], dim=1), 1)  # [B, L, K]
        if before is None:
            predicted = self._prior(dtype)[:, None, None] * torch.eye(k.shape[-1], dtype=dtype, device=k.device)
        else:
            predicted = before[..., self._value_dim :].to(dtype)
        c_sqrt, noise = (x[:, 0] if self.geometry.channel_decay else x[:, 0, :, None] for x in scalars[1:3])
        u = c_sqrt * (predicted * (c_sqrt * k)[..., None, :]).sum(-1) + noise * k
        overlap = (u * k).sum(-1)
        h = 1 / (scalars.observation_noise[:, 0] + scalars.precision * overlap)
        host = torch.zeros_like(overlap)
        if self.geometry.style == "delta":
            host = self._spread(masked.write[:, 0].to(dtype)) * k.square().sum(-1)
        return {
            name: value.unflatten(1, (-1, self.noise_groups)).mean((0, 2)).float()
            for name, value in (("gain", scalars.erase[:, 0] * h * overlap), ("host_gain", host))
        }

    def _unpack(self, state: Tensor | None, batch: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """Return the kernels' state, M beside P, and s before the first token, [B, L] or, decaying by channel,
        [B, L, K]; s is None where the state does not carry it."""
        if not self._carries_bound:
            return state, None
        if state is not None:
            state, column = state[..., :-1], state[..., -1].to(dtype)
            return state, column if self.geometry.channel_decay else column[..., 0]
        unobserved = self._prior(dtype).expand(batch, -1)
        if self.geometry.channel_decay:
            unobserved = unobserved[..., None].expand(-1, -1, self.geometry.key_dim)
        return None, unobserved

    def _noise(self, hidden: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return nu_t (restoring) or l2_t (constant): [L] from the head, [B, T, L] from the tokens' ``hidden``."""
        name = "log_nu" if self.noise == "restoring" else "log_l2"
        if self.noise_from == "head" or hidden is None:
            return self._dosed(name, dtype)
        # not in half precision, whatever autocast says: the noise is an exponential of this product
        with torch.autocast(hidden.device.type, enabled=False):
            log_noise = F.linear(hidden.to(dtype), self.noise_proj.to(dtype)) / math.sqrt(self.geometry.hidden_size)
        if name in self._names:
            log_noise = log_noise + getattr(self, name).to(dtype)
        return 1 + self.dose.to(dtype) * torch.expm1(bounded(log_noise))

    def _prediction(self, g: Tensor, level: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return a, sqrt c and n, each [..., L], for log decays [..., H] and noise ``level`` [L] or [..., L]; with K as
        their last dimension where the host decays by channel."""
        g = self._spread(g.to(dtype), -2 if self.geometry.channel_decay else -1)
        rho = self.dose.to(dtype) * self.retention
        decay = g.exp()
        c_sqrt = rho.sqrt() * decay
        noise = self._over_decays(level).expand_as(g)
        if self.noise == "restoring":
            noise = noise * ((1 - rho) - rho * torch.expm1(2 * g))  # 1 - c, with its digits where a is near 1
        return decay, c_sqrt, noise

    def _lower(self, inputs: MemoryInputs, unobserved: Tensor | None, dtype: torch.dtype) -> tuple[_Scalars, Tensor]:
        """The scalars of the lowered recurrence, and s after the last token [B, L] (None where it is not carried).

        Args:
            inputs: masked, so with zero keys and values on padding. unobserved: [B, L], s before the first token; or
                [B, L, K], decaying by channel.
        """
        decay, c_sqrt, noise = self._prediction(inputs.log_decay, self._noise(inputs.hidden, dtype), dtype)
        write = inputs.write.to(dtype)
        prior = self._prior(dtype)
        if inputs.mask is not None:
            padding = ~inputs.mask[..., None]
            write = write.masked_fill(padding, 1.0)
            padding = self._over_decays(padding)
            c_sqrt, noise = c_sqrt.masked_fill(padding, 1.0), noise.masked_fill(padding, 0.0)
        if inputs.reset is not None:
            first = self._over_decays(inputs.reset[..., None])
            noise = torch.where(first, c_sqrt.square() * self._over_decays(prior) + noise, noise)
            decay, c_sqrt = decay.masked_fill(first, 0.0), c_sqrt.masked_fill(first, 0.0)
        if unobserved is None:
            variance = self._over_decays(prior).expand_as(noise)
        else:
            variance = affine_scan(c_sqrt.square(), noise, unobserved)
            unobserved = variance[:, -1]
        square = inputs.k.to(dtype).square().sum(-1)
        square = self._spread(square.repeat_interleave(self.geometry.num_heads // square.shape[-1], dim=-1))

        if self.geometry.style == "additive":
            precision = self.dose.to(dtype) * self.log_lambda.to(dtype).exp()
            shrink = precision.expand_as(noise)
            strength = 1 / variance + precision * square
            ones = torch.ones_like(noise)
            return _Scalars(decay, c_sqrt, noise, precision, ones, shrink, shrink, strength), unobserved
        eta = self._spread(write).clamp(min=SMALLEST_STRENGTH)
        floor = NOISE_FLOOR * variance - noise
        if self.geometry.channel_decay:
            floor = floor.amax(-1)
        observation = torch.maximum((1 / eta - square).clamp(min=0), floor)
        omega = (eta * square).clamp(min=1)
        # a host with eta <= 1 passes 1 by the rounding of its keys alone, and theta leaves 1 by the square of that
        theta = (omega * (2 - omega)).clamp(min=0) if self.geometry.negative_eigenvalues else torch.ones_like(omega)
        precision = torch.ones_like(prior)
        return _Scalars(decay, c_sqrt, noise, precision, observation, omega, theta, omega), unobserved

    def _dosed(self, name: str, dtype: torch.dtype) -> Tensor:
        """[L]: 1 + d (exp(parameter) - 1), or 1 for a parameter that this rule does not have."""
        if name not in self._names:
            return torch.ones(self._memories, dtype=dtype, device=self.dose.device)
        value = getattr(self, name).to(dtype)
        if self.noise_from == "token" and name != "log_p0":
            value = bounded(value)
        return 1 + self.dose.to(dtype) * torch.expm1(value)

    def _prior(self, dtype: torch.dtype) -> Tensor:
        """p0 [L], which is nu for restoring noise."""
        return self._dosed("log_nu" if self.noise == "restoring" else "log_p0", dtype)

    def _spread(self, x: Tensor, dim: int = -1) -> Tensor:
        """H -> L along ``dim``: a head's scalars for each of its noise groups."""
        return x if self.noise_groups == 1 else x.repeat_interleave(self.noise_groups, dim=dim)

    def _over_decays(self, x: Tensor) -> Tensor:
        """[..., L] in a shape that stands beside decays: [..., L, 1] where there is one for each key channel."""
        return x[..., None] if self.geometry.channel_decay else x

    def _float32_tensors(self):
        yield from super()._float32_tensors()
        for name in self._names:
            yield name, getattr(self, name)
        if self.noise_from == "token":
            yield "noise_proj", self.noise_proj
        if self.rotations:
            yield "rotation", self.rotation
