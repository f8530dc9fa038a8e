"""What the benches share: medians, peak memory, and a rule timed both ways."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.testing
from torch import Tensor

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Shape(NamedTuple):
    batch: int
    tokens: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int


def median(run: Callable[[], Any], milliseconds: int) -> float:
    """Milliseconds of ``run``, the median of calls that take ``milliseconds`` together."""
    return triton.testing.do_bench(run, warmup=milliseconds // 4, rep=milliseconds, return_mode="median")


def graphed(run: Callable[[], Any], milliseconds: int) -> float:
    """As :func:`median`, of a call within a CUDA graph: a decode step takes the GPU less time than Python to start."""
    return triton.testing.do_bench_cudagraph(run, rep=milliseconds, return_mode="median")


def peak(run: Callable[[], Any]) -> float:
    """MiB that a call of ``run`` takes at most beyond what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def both_ways(rule: Callable[..., Any], arguments: dict[str, Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A call without gradients, and one with those of all ``arguments``, from a random gradient of the outputs."""
    do = torch.randn_like(arguments["v"])

    def forward() -> Any:
        with torch.no_grad():
            return rule(**arguments)

    def both() -> Any:
        return torch.autograd.grad(rule(**arguments)[0], list(arguments.values()), do, allow_unused=True)

    return forward, both


def timed(forward: Callable[[], Any], both: Callable[[], Any], milliseconds: int) -> dict[str, float]:
    """Medians of both, and the peak of memory of the second, above its inputs and the gradient of its outputs."""
    both()  # compiles
    memory = peak(both)
    return {
        "forward_ms": median(forward, milliseconds), "forward_backward_ms": median(both, milliseconds),
        "peak_memory_mib": memory,
    }


def environment(dtype: str) -> dict[str, Any]:
    """What every bench's figures start with."""
    return {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": dtype,
        "shapes": {},
    }


def say(name: str, figures: dict[str, float | str]) -> None:
    """Figures to stderr as they become known: a run that is stopped has printed them."""
    known = ", ".join(f"{key} {x if isinstance(x, str) else f'{x:.3f}'}" for key, x in figures.items())
    print(f"{name}: {known}", file=sys.stderr, flush=True)
