"""Palimpsa on a GPU: forward, forward and backward, peak memory, decode; beside the authors' kernel and simple GLA.

Simple GLA comes last: flash-linear-attention tunes itself for minutes when it first runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import timing
from .timing import DTYPES, Shape

# reciprocals a second of one H200: 132 multiprocessors, 16 a clock, 1.98 GHz; each element of each token takes one
CEILING = 4.2e12


class Authors(NamedTuple):
    """The authors' public kernel on one H200 at the same shape, bf16: milliseconds, and MiB."""

    forward: float
    both: float
    memory: float


SHAPES = {
    "170M": Shape(8, 4096, 16, 16, 48, 96),
    "760M": Shape(4, 4096, 16, 16, 96, 192),
    "2.7B": Shape(2, 4096, 80, 80, 128, 64),
    "GDN-128": Shape(4, 4096, 16, 16, 128, 128),
    "340M": Shape(8, 2048, 4, 4, 256, 256),
    # Mamba2 2.7B as it is: one group of keys for all heads
    "2.7B-grouped": Shape(2, 4096, 80, 1, 128, 64),
}
AUTHORS = {
    "170M": Authors(14.15, 77.2, 3284),
    "760M": Authors(28.1, 155.5, 5591),
    "2.7B": Authors(38.5, 204.2, 6666),
    "2.7B-grouped": Authors(38.5, 204.2, 6666),
    "GDN-128": Authors(20.2, 108.3, 4946),
    "340M": Authors(19.2, 108.7, 4532),
}
DECODE = Shape(64, 1, 80, 1, 128, 64)


def inputs(shape: Shape, dtype: torch.dtype, *, seed: int = 0, requires_grad: bool = False) -> dict[str, Tensor]:
    """Random inputs of ``palimpsa`` with unit keys, decays from 0.55 to nearly 1, and b between 0 and 1."""
    generator = torch.Generator(timing.DEVICE).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=timing.DEVICE)

    batch, tokens, heads, groups, key_dim, value_dim = shape
    k = torch.nn.functional.normalize(normal(batch, tokens, groups, key_dim), dim=-1)
    arguments = {
        "q": normal(batch, tokens, groups, key_dim).to(dtype),
        "k": k.to(dtype),
        "v": normal(batch, tokens, heads, value_dim).to(dtype),
        "b": normal(batch, tokens, heads, value_dim).sigmoid().to(dtype),
        "log_decay": -torch.nn.functional.softplus(2 * normal(batch, tokens, heads) - 4),
        "prior": normal(heads).exp(),
    }
    return {name: x.requires_grad_(requires_grad) for name, x in arguments.items()}


def _simple_gla(name: str, dtype: torch.dtype, milliseconds: int) -> float:
    """Forward of the additive rule in flash-linear-attention."""
    shape = SHAPES[name]
    arguments = inputs(shape, dtype)
    chunk_simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    q, k = (arguments[name].repeat_interleave(shape.heads // shape.groups, 2) for name in "qk")
    v, g = arguments["v"], arguments["log_decay"]
    with torch.no_grad():
        return timing.median(lambda: chunk_simple_gla(q, k, v, g, scale=1.0), milliseconds)


def _one(name: str, dtype: torch.dtype, milliseconds: int) -> dict:
    from surgery.kernels.palimpsa.triton import palimpsa

    shape = SHAPES[name]
    arguments = inputs(shape, dtype, requires_grad=True)
    row = timing.timed(*timing.both_ways(palimpsa, arguments), milliseconds)
    elements = shape.batch * shape.tokens * shape.heads * shape.key_dim * shape.value_dim
    row |= {
        "shape": shape._asdict(), "forward_elements_per_second": elements / row["forward_ms"] * 1e3,
        "ceiling_elements_per_second": CEILING,
    }
    if name in AUTHORS and dtype == torch.bfloat16:
        theirs = AUTHORS[name]
        row["authors"] = {
            **theirs._asdict(), "forward_ratio": theirs.forward / row["forward_ms"],
            "both_ratio": theirs.both / row["forward_backward_ms"],
            "memory_ratio": theirs.memory / row["peak_memory_mib"],
        }
    return row


def _decode(dtype: torch.dtype, milliseconds: int) -> dict:
    """One step against the time in which its states could be read and written once at copy bandwidth."""
    from surgery.kernels.palimpsa.triton import palimpsa_step

    arguments = inputs(DECODE, dtype)
    batch, _, heads, _, key_dim, value_dim = DECODE
    state = torch.rand(batch, 2, heads, value_dim, key_dim, device=timing.DEVICE)
    other = torch.empty_like(state)
    copy = timing.graphed(lambda: other.copy_(state), milliseconds)
    step = timing.graphed(lambda: palimpsa_step(**arguments, state=state), milliseconds)
    return {"shape": DECODE._asdict(), "step_ms": step, "copy_ms": copy, "ratio": step / copy}


def measure(dtype: str, names: list[str], milliseconds: int, known: Callable[[dict], None]) -> dict:
    """Medians of every shape named, as a JSON-able dictionary; ``known`` gets it whenever it has grown."""
    figures = timing.environment(dtype)
    for name in names:
        row = figures["shapes"][name] = _one(name, DTYPES[dtype], milliseconds)
        print(_line(name, row), file=sys.stderr, flush=True)
        known(figures)
    figures["decode"] = _decode(DTYPES[dtype], milliseconds)
    print(_decode_line(figures["decode"]), file=sys.stderr, flush=True)
    known(figures)
    if importlib.util.find_spec("fla") is not None:
        for name in names:
            row = figures["shapes"][name]
            row["simple_gla_forward_ms"] = _simple_gla(name, DTYPES[dtype], milliseconds)
            print(f"{name}: simple GLA's forward {row['simple_gla_forward_ms']:.3f} ms", file=sys.stderr, flush=True)
            known(figures)
    return figures


def _line(name: str, row: dict) -> str:
    theirs = row.get("authors")
    ratios = [f"{theirs[key]:.1f}" if theirs else "-" for key in ("forward_ratio", "both_ratio", "memory_ratio")]
    speed, gla = row["forward_elements_per_second"], row.get("simple_gla_forward_ms")
    return (
        f"{name:<13}{row['forward_ms']:>9.3f}{ratios[0]:>7}{row['forward_backward_ms']:>12.3f}{ratios[1]:>7}"
        f"{row['peak_memory_mib']:>8.0f}{ratios[2]:>7}{speed:>12.3g}{speed / CEILING:>11.2f}"
        f"{'-' if gla is None else f'{gla:.3f}':>8}"
    )


def _decode_line(step: dict) -> str:
    return (
        f"decode {tuple(step['shape'].values())}: {step['step_ms']:.3f} ms, copying the states {step['copy_ms']:.3f} ms"
        f" ({step['ratio']:.2f} times)"
    )


def table(figures: dict) -> str:
    """The figures as text, one line a shape."""
    lines = [
        f"Palimpsa on {figures['device']}, {figures['dtype']}, torch {figures['torch']}, triton {figures['triton']}",
        "Ratios: the authors' public kernel on an H200, over this one. GLA: simple GLA's forward, where installed.",
        f"{'shape':<13}{'fwd ms':>9}{'ratio':>7}{'fwd+bwd ms':>12}{'ratio':>7}{'MiB':>8}{'ratio':>7}"
        f"{'elements/s':>12}{'of 4.2e12':>11}{'GLA ms':>8}",
    ]
    lines += [_line(name, row) for name, row in figures["shapes"].items()]
    lines.append(_decode_line(figures["decode"]))
    return "\n".join(lines)
