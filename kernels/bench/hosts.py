"""The hosts' own rules on a GPU, the gated delta rule and the additive one with a decay: forward, forward and backward,
peak memory; beside flash-linear-attention's where that is installed. Its backward pass is refused on some GPUs by some
versions of Triton, and the name of its error is printed then."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import timing
from .timing import DTYPES, Shape


class Stored(NamedTuple):
    """A public kernel on one H200 at the same shape, bf16: milliseconds, and MiB."""

    forward: float
    both: float
    memory: float


RULES = {"340M": "delta", "GDN-128": "delta", "760M": "delta", "2.7B": "additive"}
SHAPES = {
    "340M": Shape(16, 2048, 4, 4, 256, 256),
    "GDN-128": Shape(4, 4096, 16, 16, 128, 128),
    "760M": Shape(4, 4096, 16, 16, 96, 192),
    "2.7B": Shape(2, 4096, 80, 1, 128, 64),
}
STORED = {"760M": Stored(0.59, 2.71, 1044.0)}  # the gated delta rule's


def inputs(name: str, dtype: torch.dtype, *, seed: int = 0) -> dict[str, Tensor]:
    """Random arguments of the shape's rule, all with gradients: unit keys, decays from 0.55 to nearly 1."""
    batch, tokens, heads, groups, key_dim, value_dim = SHAPES[name]
    generator = torch.Generator(timing.DEVICE).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=timing.DEVICE)

    q, k = (torch.nn.functional.normalize(normal(batch, tokens, groups, key_dim), dim=-1).to(dtype) for _ in range(2))
    arguments = {
        "q": q, "k": k, "v": normal(batch, tokens, heads, value_dim).to(dtype),
        "log_decay": -torch.nn.functional.softplus(2 * normal(batch, tokens, heads) - 4),
        {"delta": "beta", "additive": "write"}[RULES[name]]: normal(batch, tokens, heads).sigmoid(),
    }
    return {name: x.requires_grad_() for name, x in arguments.items()}


def _rule(name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"surgery.kernels.{RULES[name]}.chunked")
    return getattr(module, RULES[name])


def _public(name: str, dtype: torch.dtype, milliseconds: int) -> dict[str, float | str]:
    """fla's figures; empty where it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return {}
    given = inputs(name, dtype)
    heads = SHAPES[name].heads
    arguments = {key: given[key].detach().repeat_interleave(heads // SHAPES[name].groups, 2) for key in ("q", "k")}
    arguments |= {"v": given["v"].detach(), "g": given["log_decay"].detach()}
    if RULES[name] == "delta":
        rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        arguments["beta"] = given["beta"].detach()
    else:
        rule = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    forward, both = timing.both_ways(rule, {key: x.requires_grad_() for key, x in arguments.items()})
    figures = {}
    for part, run in (("fla_forward_ms", forward), ("fla_forward_backward_ms", both)):
        try:
            figures[part] = timing.median(run, milliseconds)
        except Exception as error:  # the library refuses some of its kernels on some compilers
            figures[part] = type(error).__name__
    return figures


def measure(dtype: str, names: list[str], milliseconds: int, known: Callable[[dict], None]) -> dict:
    """Medians of every shape named, as a JSON-able dictionary; ``known`` gets it whenever it has grown."""
    figures = timing.environment(dtype)
    for name in names:
        forward, both = timing.both_ways(_rule(name), inputs(name, DTYPES[dtype]))
        row = figures["shapes"][name] = timing.timed(forward, both, milliseconds)
        row |= {"rule": RULES[name], "shape": SHAPES[name]._asdict()}
        if name in STORED and dtype == "bf16":
            row["stored"] = STORED[name]._asdict()
        timing.say(name, {key: x for key, x in row.items() if isinstance(x, float)})
        known(figures)
    for name in names:
        public = _public(name, DTYPES[dtype], milliseconds)
        figures["shapes"][name] |= public
        timing.say(name, public)
        known(figures)
    return figures


def table(figures: dict) -> str:
    """The figures as text, one line a shape."""

    def text(value: float | str | None) -> str:
        return "-" if value is None else value if isinstance(value, str) else f"{value:.3f}"

    lines = [
        f"Host rules on {figures['device']}, {figures['dtype']}, torch {figures['torch']}, Triton {figures['triton']}",
        f"{'shape':<9}{'rule':<10}{'fwd ms':>8}{'fwd+bwd ms':>12}{'MiB':>7}   fla, here; stored",
    ]
    for name, row in figures["shapes"].items():
        theirs = ", ".join(text(row.get(f"fla_{part}_ms")) for part in ("forward", "forward_backward"))
        stored = row.get("stored", {})
        lines.append(
            f"{name:<9}{row['rule']:<10}{row['forward_ms']:>8.3f}{row['forward_backward_ms']:>12.3f}"
            f"{row['peak_memory_mib']:>7.0f}   {theirs}; {', '.join(text(stored.get(key)) for key in Stored._fields)}"
        )
    return "\n".join(lines)
