"""What the Bayesian rule's Triton kernels share: tables of scalars, ratios, triangular inverses, products.

Shapes: B batch, T tokens, H value heads, G key heads (H % G == 0), K key width, V value width, N chunks of CHUNK
tokens. Buffers between kernels are float32 and laid out by head: [B, H, N CHUNK, ...]. Keys of padding are zero, its
scalars those of a token that leaves the state as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# tokens between the boundary states that are kept
CHUNK = 64
MAX_KEY, MAX_VALUE = 256, 512
# of keys where there is not enough shared memory for wider ones: the backward pass's largest kernels take 104 KB with
# keys of 128, 128 with 256
SMALL_KEY = 64

# products with a sum become one instruction: newer releases of Triton ask for that explicitly
OPTIONS = {"enable_fp_fusion": True}

# rows of a table of scalars
NOISE: tl.constexpr = tl.constexpr(0)  # n, the process noise
OBSERVATION: tl.constexpr = tl.constexpr(1)  # y
ERASE: tl.constexpr = tl.constexpr(2)  # p
SHRINK: tl.constexpr = tl.constexpr(3)  # r
WRITE: tl.constexpr = tl.constexpr(4)  # z
GATHERED: tl.constexpr = tl.constexpr(5)  # N, the process noise gathered since the chunk's start


class Shape(NamedTuple):
    batch: int
    tokens: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> Shape:
        batch, tokens, groups, key_dim = k.shape
        return cls(batch, tokens, v.shape[2], groups, key_dim, v.shape[3])

    @property
    def programs(self) -> int:
        return self.batch * self.heads

    @property
    def chunks(self) -> int:
        return -(-self.tokens // CHUNK)

    @property
    def padded(self) -> int:
        return self.chunks * CHUNK

    def key_blocks(self, largest: int) -> tuple[int, int]:
        """Width and number of the blocks that cover the keys."""
        width = min(largest, max(16, triton.next_power_of_2(self.key_dim)))
        return width, triton.cdiv(self.key_dim, width)

    def value_block(self, largest: int) -> int:
        return min(largest, max(16, triton.next_power_of_2(self.value_dim)))

    def buffer(self, like: Tensor, *size: int) -> Tensor:
        """An uninitialised float32 [B, H, N CHUNK, *size]."""
        return torch.empty(self.batch, self.heads, self.padded, *size, dtype=torch.float32, device=like.device)


class Table(NamedTuple):
    """Each token's scalars [6, B, H, N CHUNK] and the logarithms, summed from the chunk's start, of its decays a and
    sqrt c [2, B, H, N CHUNK] in float64."""

    scalars: Tensor
    logs: Tensor


@triton.jit
def ratios(logs, start, C: tl.constexpr):
    """[C, C] products of a step over s < j <= t at [t, s], for C tokens from ``start`` on; zeros above the diagonal."""
    at = tl.load(logs + start + tl.arange(0, C))
    difference = (at[:, None] - at[None, :]).to(tl.float32)
    lower = tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :]
    return tl.where(lower, tl.exp(tl.minimum(difference, 0.0)), 0.0)


@triton.jit
def rounded(x):
    """x rounded to the nearest tf32 number, in float32."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def nearest_tf32(x, PRECISION: tl.constexpr):
    """What a product in tf32 would cut off, rounded to nearest instead: half the error, and none of it biased."""
    if PRECISION == "tf32":
        x = rounded(x)
    return x


@triton.jit
def _operand(x, PRECISION: tl.constexpr):
    """x, which bfloat16 holds as it is, for a product: the interpreter multiplies bfloat16 wrongly."""
    if PRECISION == "bf16x6":
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def _leading(x):
    """x cut to bfloat16's digits, in float32."""
    return (x.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _pieces(x, PRECISION: tl.constexpr):
    """Three operands in bfloat16 whose sum is x to the last of its 24 digits, since cutting leaves 8 to each."""
    one = _leading(x)
    rest = x - one
    two = _leading(rest)
    return _operand(one, PRECISION), _operand(two, PRECISION), _operand(rest - two, PRECISION)


@triton.jit
def dot(a, b, c, A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr):
    """c + a b in ``tf32``, ``ieee``, or with float32's digits (error 2^-22 and less) ``tf32x3`` or ``bf16x6``.

    A and B promise that tf32 (for ``bf16x6``: bfloat16) holds ``a`` or ``b`` as it is, which then needs fewer passes.
    Written out, since Triton's own tf32x3 spends as many instructions on infinities as on the numbers.
    """
    if PRECISION == "bf16x6" or PRECISION == "bf16x6-interpreted":
        if A and B:
            return tl.dot(_operand(a, PRECISION), _operand(b, PRECISION), c)
        if A:
            a1 = _operand(a, PRECISION)
            b1, b2, b3 = _pieces(b, PRECISION)
            return tl.dot(a1, b1, tl.dot(a1, b2, tl.dot(a1, b3, c)))
        a1, a2, a3 = _pieces(a, PRECISION)
        if B:
            b1 = _operand(b, PRECISION)
            return tl.dot(a1, b1, tl.dot(a2, b1, tl.dot(a3, b1, c)))
        b1, b2, b3 = _pieces(b, PRECISION)
        c = tl.dot(a1, b3, tl.dot(a2, b2, tl.dot(a3, b1, c)))
        return tl.dot(a1, b1, tl.dot(a1, b2, tl.dot(a2, b1, c)))
    if PRECISION != "tf32x3":
        return tl.dot(a, b, c, input_precision=PRECISION)
    if A and B:
        return tl.dot(a, b, c, input_precision="tf32")
    if A:
        b_high = rounded(b)
        c = tl.dot(a, b - b_high, c, input_precision="tf32")
        return tl.dot(a, b_high, c, input_precision="tf32")
    a_high = rounded(a)
    if B:
        c = tl.dot(a - a_high, b, c, input_precision="tf32")
        return tl.dot(a_high, b, c, input_precision="tf32")
    b_high = rounded(b)
    c = tl.dot(a - a_high, b_high, c, input_precision="tf32")
    c = tl.dot(a_high, b - b_high, c, input_precision="tf32")
    return tl.dot(a_high, b_high, c, input_precision="tf32")


@triton.jit
def load_tokens(pointer, first, T, stride, start, width: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """[C, BLOCK] of rows ``stride`` apart, from token ``first`` and column ``start`` on, in float32; zeros outside."""
    t = tl.arange(0, C)
    d = start + tl.arange(0, BLOCK)
    pointer += (tl.zeros((), tl.int64) + first) * stride
    inside = (t < T - first)[:, None]
    if width % BLOCK != 0:
        inside = inside & (d < width)[None, :]
    return tl.load(pointer + t[:, None] * stride + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tokens(pointer, x, first, T, stride, start, width, C: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.arange(0, C)
    d = start + tl.arange(0, BLOCK)
    pointer += (tl.zeros((), tl.int64) + first) * stride
    inside = (t < T - first)[:, None] & (d < width)[None, :]
    tl.store(pointer + t[:, None] * stride + d[None, :], x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_matrix(
    pointer, row, column, rows: tl.constexpr, columns: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """The block [BR, BC] at (row, column) of a contiguous [rows, columns]; zeros outside. ``row`` and ``column`` are
    multiples of BR and BC."""
    i = row + tl.arange(0, BR)
    j = column + tl.arange(0, BC)
    if rows % BR == 0 and columns % BC == 0:
        return tl.load(pointer + i[:, None] * columns + j[None, :])
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(pointer + i[:, None] * columns + j[None, :], mask=inside, other=0.0)


@triton.jit
def store_matrix(
    pointer, x, row, column, rows: tl.constexpr, columns: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    i = row + tl.arange(0, BR)
    j = column + tl.arange(0, BC)
    if rows % BR == 0 and columns % BC == 0:
        tl.store(pointer + i[:, None] * columns + j[None, :], x)
        return
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(pointer + i[:, None] * columns + j[None, :], x, mask=inside)


@triton.jit
def square(pointer, i, j, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """Pointers to block (i, j) of SIZE x SIZE blocks in rows of STRIDE."""
    row = i * SIZE + tl.arange(0, SIZE)
    column = j * SIZE + tl.arange(0, SIZE)
    return pointer + row[:, None] * STRIDE + column[None, :]


@triton.jit
def invert_unit_lower(pointer, C: tl.constexpr):
    """In place, the inverse of I + L for the strictly lower triangular L [C, C] stored at ``pointer``; C = 64.

    The diagonal blocks of 16 by substitution, all four at once, and the rest from products. What stands on and above
    the diagonal is not read, and holds the inverse's ones and zeros afterwards.
    """
    tl.static_assert(C == 64)
    tl.debug_barrier()
    block = tl.arange(0, 4)[:, None, None]
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    place = pointer + (16 * block + i) * C + 16 * block + j
    x = tl.where(i > j, -tl.load(place), 0.0)
    # row s is final once the rows above have been added to it: x[s] + sum_j x[s, j] inverse[j]
    for s in range(2, 16):
        row = tl.sum(tl.where(i == s, x, 0.0), 1)  # [4, 16]
        row += tl.sum(row[:, :, None] * x, 1)
        x = tl.where(i == s, row[:, None, :], x)
    tl.store(place, x + tl.where(i == j, 1.0, 0.0))
    join_unit_lower(pointer, C, "tf32x3")


@triton.jit
def join_unit_lower(pointer, C: tl.constexpr, PRECISION: tl.constexpr):
    """In place, the inverse of the unit lower triangular matrix [C, C] at ``pointer`` whose diagonal blocks of 16 are
    inverted already; C = 64. What stands above those blocks is not read, and is zero afterwards."""
    tl.static_assert(C == 64)
    tl.debug_barrier()
    for half in tl.static_range(2):
        low = 2 * half
        first = tl.load(square(pointer, low, low, C, 16))
        second = tl.load(square(pointer, low + 1, low + 1, C, 16))
        between = tl.load(square(pointer, low + 1, low, C, 16))
        none = tl.zeros((16, 16), tl.float32)
        corner = dot(dot(second, between, none, False, False, PRECISION), first, none, False, False, PRECISION)
        tl.store(square(pointer, low + 1, low, C, 16), -corner)
        tl.store(square(pointer, low, low + 1, C, 16), none)
    tl.debug_barrier()
    first = tl.load(square(pointer, 0, 0, C, 32))
    second = tl.load(square(pointer, 1, 1, C, 32))
    between = tl.load(square(pointer, 1, 0, C, 32))
    none = tl.zeros((32, 32), tl.float32)
    corner = dot(dot(second, between, none, False, False, PRECISION), first, none, False, False, PRECISION)
    tl.store(square(pointer, 1, 0, C, 32), -corner)
    tl.store(square(pointer, 0, 1, C, 32), none)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["T", "H", "padded"])
def _table_kernel(
    decay, cov_decay_sqrt, noise, observation, erase, shrink, write, scalars, logs, T, H, padded, C: tl.constexpr
):
    start = tl.program_id(0) * C
    bh = tl.program_id(1).to(tl.int64)
    t = start + tl.arange(0, C)
    live = t < T
    token = (bh // H * T + t) * H + bh % H
    out = scalars + bh * padded + t
    size = tl.num_programs(1).to(tl.int64) * padded
    # exp(-800) is 0 in float64 too, and sums over a chunk stay exact to 1e-11
    a = tl.load(decay + token, mask=live, other=1.0).to(tl.float64)
    c = tl.load(cov_decay_sqrt + token, mask=live, other=1.0).to(tl.float64)
    a = tl.cumsum(tl.where(a > 0, tl.maximum(tl.log(tl.where(a > 0, a, 1.0)), -800.0), -800.0), 0)
    c = tl.cumsum(tl.where(c > 0, tl.maximum(tl.log(tl.where(c > 0, c, 1.0)), -800.0), -800.0), 0)
    tl.store(logs + bh * padded + t, a)
    tl.store(logs + size + bh * padded + t, c)
    n = tl.load(noise + token, mask=live, other=0.0).to(tl.float32)
    tl.store(out + NOISE * size, n)
    tl.store(out + OBSERVATION * size, tl.load(observation + token, mask=live, other=1.0).to(tl.float32))
    tl.store(out + ERASE * size, tl.load(erase + token, mask=live, other=0.0).to(tl.float32))
    tl.store(out + SHRINK * size, tl.load(shrink + token, mask=live, other=0.0).to(tl.float32))
    tl.store(out + WRITE * size, tl.load(write + token, mask=live, other=0.0).to(tl.float32))
    tl.debug_barrier()
    ratio = ratios(logs + size + bh * padded, start, C)
    tl.store(out + GATHERED * size, tl.sum(ratio * ratio * n[None, :], 1))


def tables(shape: Shape, scalars: tuple[Tensor, ...]) -> Table:
    """The table of (decay, cov_decay_sqrt, process_noise, observation_noise, erase, shrink, write), each [B, T, H]."""
    like = scalars[0]
    table = torch.empty(6, shape.batch, shape.heads, shape.padded, dtype=torch.float32, device=like.device)
    logs = torch.empty_like(table[:2], dtype=torch.float64)
    _table_kernel[(shape.chunks, shape.programs)](
        *scalars, table, logs, shape.tokens, shape.heads, shape.padded, C=CHUNK, num_warps=4
    )
    return Table(table, logs)


def exact(k: Tensor, precision: str = "tf32") -> bool:
    """Whether the operands of a product in ``precision`` hold the keys, so that it needs fewer passes."""
    return k.dtype == torch.bfloat16 or (k.dtype == torch.float16 and not precision.startswith("bf16"))


def covariance_precision() -> str:
    """Of the covariance's products: float32's digits, always."""
    return "bf16x6-interpreted" if triton.knobs.runtime.interpret else "bf16x6"


def mean_precision(*tensors: Tensor) -> str:
    """Of the mean's products: one pass of tf32 under half precision inputs, else three."""
    return "tf32x3" if any(tensor.dtype == torch.float32 for tensor in tensors) else "tf32"
