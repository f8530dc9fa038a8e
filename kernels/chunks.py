"""What every form of a memory rule shares: the dtype it computes in, its heads, its chunks of tokens.

Shapes: B batch, T tokens, H value heads, G key heads (H % G == 0), K key width, V value width, N chunks of C tokens.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


def _builds() -> bool:
    """Whether Triton can build what starts its kernels: a C compiler and Python's headers are there."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    return bool(compiler) and headers.exists() and importlib.util.find_spec("triton") is not None


# looked up once: torch.compile cannot trace the search
TRITON = _builds()

# the least log decay: exp of it is 0 in float64 too, and sums of it over a chunk are exact to 1e-11
FORGOTTEN = -800.0

# heads of all texts of a batch that one launch takes: CUDA's limit of a grid's second and third axis
MAX_HEADS = 65535


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, otherwise float32: the precision of states and gates."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def operand_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """What matrix products take: the inputs' half precision on CUDA, where their sums are float32 all the same, and
    otherwise :func:`compute_dtype`, since a CPU gains nothing by it."""
    half = q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype
    return q.dtype if half and q.is_cuda else compute_dtype(q, k, v)


def fused(x: Tensor, by_default: bool) -> bool:
    """Whether a part of a chunked form runs in Triton on ``x``: on CUDA, where ``by_default`` or SURGERY_KERNELS=triton
    asks for it."""
    if not TRITON or not x.is_cuda or x.dtype == torch.float64:
        return False
    forced = os.environ.get("SURGERY_KERNELS")
    return forced == "triton" if forced else by_default


def steps(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> bool:
    """Whether a rule is to take one token from ``state`` in a Triton kernel of its own."""
    if state is None or v.shape[1] != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return state.dtype == compute_dtype(q, k, v) == torch.float32 and fused(v, by_default=True)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, G, K] -> [B, T, H, K]: value head h reads key head h // (H // G)."""
    groups = x.shape[2]
    return x if groups == heads else x.repeat_interleave(heads // groups, dim=2)


def check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, channels: bool = False) -> None:
    """Assert the shapes every rule shares; ``channels`` allows a decay for each key channel, [B, T, H, K]."""
    batch, tokens, groups, key_dim = k.shape
    heads = v.shape[2]
    assert q.shape == k.shape, f"q {tuple(q.shape)} and k {tuple(k.shape)} differ"
    assert v.shape[:2] == (batch, tokens), f"v {tuple(v.shape)} does not have the tokens of k {tuple(k.shape)}"
    assert heads % groups == 0, f"{heads} value heads are no multiple of {groups} key heads"
    shapes = ((batch, tokens, heads), (batch, tokens, heads, key_dim))[: 1 + channels]
    wanted = "[B, T, H] or [B, T, H, K]" if channels else "[B, T, H]"
    assert log_decay.shape in shapes, f"log_decay {tuple(log_decay.shape)} is not {wanted}"
    assert tokens >= 1, "at least one token is needed"


def check_state(state: Tensor, *shape: int) -> None:
    """Assert the shape of a state of which a kernel reads and writes as much as the other arguments say."""
    assert state.shape == shape, f"the state {tuple(state.shape)} is not {shape}"


def without_autocast(rule: Callable) -> Callable:
    """Run ``rule`` with autocast off: a state rounded to bf16 at every chunk forgets what it should keep."""

    @functools.wraps(rule)
    def run(q: Tensor, *args, **options):
        with torch.autocast(device_type=q.device.type, enabled=False):
            return rule(q, *args, **options)

    return run


def on_its_device(operator: Callable) -> Callable:
    """Run ``operator`` with the GPU of its first tensor as the current one, where Triton starts kernels; torch's own
    operators do the same, and a model whose layers are spread over GPUs relies on it."""

    @functools.wraps(operator)
    def run(*args):
        device = next(x.device for x in args if isinstance(x, Tensor))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return operator(*args)
        with torch.cuda.device(device):
            return operator(*args)

    return run


def chunk_length(tokens: int) -> int:
    """Tokens a chunk: 64, or the power of two from 16 that holds a shorter sequence."""
    return 64 if tokens > 32 else 32 if tokens > 16 else 16


def split(x: Tensor, chunk: int) -> Tensor:
    """[B, T, ...] -> [B, N, C, ...], padded at the end with zeros, which no rule's state notices."""
    missing = -x.shape[1] % chunk
    if missing:
        x = functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    return x.unflatten(1, (-1, chunk))


def token_stride(x: Tensor) -> tuple[Tensor, int]:
    """[B, N, C, heads, width] for a kernel that steps from token to token with one stride, and that stride: as it is,
    if it is a slice of a wider projection's channels, or else contiguous."""
    _, chunks, chunk, heads, width = x.shape
    stride = x.stride(2)
    if x.stride() != (chunks * chunk * stride, chunk * stride, stride, width, 1):
        x, stride = x.contiguous(), heads * width
    return x, stride


def step_gradients(read: Tensor, written: Tensor, carried: Tensor, recalled: Tensor, through: Tensor) -> Tensor:
    """The gradients of log decays [B, N, C, H] in float64, each the sum over every product that its decay stands in.

    Args:
        read, written: [B, N, C, H], the sums over pairs of tokens in a chunk, by the later and by the earlier of both;
            exactly the same pairs, of which those on one side of a step cancel.
        carried, recalled: [B, N, C, H], of what a token wrote for the chunk's end, and read of the state met.
        through: [B, N, H], of the state that passes through the chunk.
    """
    read, written, carried, recalled = (x.double() for x in (read, written, carried, recalled))
    # shifted, not subtracted afterwards: under hard forgetting a step's gradient is far below its own token's
    carried = functional.pad(carried[:, :, :-1], (0, 0, 1, 0)).cumsum(2)
    after = (read - written + recalled).flip(2).cumsum(2).flip(2)
    return after + carried + through[:, :, None].double()


class Decays(NamedTuple):
    """Products of the decays in each chunk, each at most 1 and never formed as a ratio of products."""

    within: Tensor  # [B, N, H, C, C], from just after token s (row) to t (column); 0 where s > t
    from_start: Tensor  # [B, N, H, C], from the chunk's start to t

    @property
    def to_end(self) -> Tensor:
        """[B, N, H, C], from just after t to the chunk's end."""
        return self.within[..., -1]

    @property
    def whole(self) -> Tensor:
        """[B, N, H], over the chunk."""
        return self.from_start[..., -1]


def chunk_decays(log_decay: Tensor, reset: Tensor | None, chunk: int, dtype: torch.dtype) -> Decays:
    """The decays of [B, T, H] log decays, in ``dtype``; a decay across a reset is exactly 0.

    Each logarithm is the sum of its own steps. Differences of cumulative sums would lose 1e-4 in float32 where a chunk
    of steps near -20 sums to about -1000, would be NaN across a reset, and would leave rounding errors in the gradient
    that exceed it under hard forgetting.
    """
    steps = log_decay.to(dtype)
    if reset is not None:
        steps = steps.masked_fill(reset[..., None], -torch.inf)
    steps = split(steps, chunk).transpose(2, 3)  # [B, N, H, C]
    upper = torch.ones(chunk, chunk, dtype=torch.bool, device=steps.device).triu()
    logs = steps[..., None, :].where(upper.triu(1), 0.0).cumsum(-1).masked_fill(~upper, -torch.inf)
    return Decays(within=logs.exp(), from_start=steps.cumsum(-1).exp())
