"""Two passes along the chunks at once, the second a segment behind the first.

A pass along the chunks has one program a head, which leaves multiprocessors idle; what follows it, chunk by chunk, can
run there meanwhile.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

SEGMENTS = 4
SHORTEST = 4  # chunks: a launch costs more than it hides below that


def segments(chunks: int) -> list[tuple[int, int]]:
    """The chunks in at most SEGMENTS parts of nearly the same length, (first, behind the last) each."""
    count = max(1, min(SEGMENTS, chunks // SHORTEST))
    bounds = [chunks * i // count for i in range(count + 1)]
    return list(itertools.pairwise(bounds))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # its few programs first: everything else waits for them
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], AbstractContextManager]]:
    """Within it, ``with ahead():`` launches on a stream of its own what then runs beside the work launched outside.

    That stream starts after everything launched before, and work launched outside starts after every ``ahead()`` block
    before it: so tensors made on the current stream are safe to use on both, and to free afterwards.
    """
    if device.type != "cuda":
        yield nullcontext
        return
    current, other = torch.cuda.current_stream(device), _stream(device)
    other.wait_stream(current)

    @contextmanager
    def ahead() -> Iterator[None]:
        with torch.cuda.stream(other):
            yield
        current.wait_stream(other)

    yield ahead
