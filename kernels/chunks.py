"""What every form of a memory rule shares: the dtype it computes in, its heads, its chunks of tokens.

Shapes: B batch, T tokens, H value heads, G key heads (H % G == 0), K key width, V value width, N chunks of C tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, otherwise float32: the precision of states and gates."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, G, K] -> [B, T, H, K]: value head h reads key head h // (H // G)."""
    groups = x.shape[2]
    return x if groups == heads else x.repeat_interleave(heads // groups, dim=2)


def check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> None:
    """Assert the shapes every rule shares."""
    batch, tokens, groups, _ = k.shape
    heads = v.shape[2]
    assert q.shape == k.shape, f"q {tuple(q.shape)} and k {tuple(k.shape)} differ"
    assert v.shape[:2] == (batch, tokens), f"v {tuple(v.shape)} does not have the tokens of k {tuple(k.shape)}"
    assert heads % groups == 0, f"{heads} value heads are no multiple of {groups} key heads"
    assert log_decay.shape == (batch, tokens, heads), f"log_decay {tuple(log_decay.shape)} is not [B, T, H]"
    assert tokens >= 1, "at least one token is needed"
