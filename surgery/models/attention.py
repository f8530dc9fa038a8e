"""Softmax attention in flash-linear-attention's layout, for the hybrids of its families: plain torch, any device.

    q_proj [H d, D]; k_proj, v_proj [G d, D], biases where ``qkv_bias``; o_proj [D, H d]; q_norm, k_norm [d] where
    ``qk_norm``

with rotary positions in halves (not interleaved). Shapes: B batch, T tokens of this call, P tokens of the cache before
them, S = P + T, H heads, G key heads, d = D / H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surgery.graft.base import RMSNorm, wide


@dataclass(frozen=True)
class AttentionSpec:
    """What a configuration's ``attn`` says of some layers.

    Attributes:
        window: the last so many tokens, a token itself included, are seen; None for all.
    """

    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    rope_theta: float = 10000.0


def attention_specs(attn: Any, hidden_size: int, num_layers: int) -> dict[int, AttentionSpec]:
    """Layer -> its attention, from ``attn``: None, one mapping, or a list of them.

    Raises:
        ValueError: what is wrong with it, beginning with ``attn``.
    """
    found: dict[int, AttentionSpec] = {}
    for one in attn if isinstance(attn, list) else [attn] if attn else []:
        if not isinstance(one, dict):
            raise ValueError(f"attn: {one!r} is no mapping")
        layers, heads = one.get("layers"), one.get("num_heads")
        if not isinstance(layers, (list, tuple)) or not all(type(i) is int and 0 <= i < num_layers for i in layers):
            raise ValueError(f"attn.layers: {layers!r} are not indices below {num_layers}")
        if len({*layers, *found}) < len(layers) + len(found):
            raise ValueError(f"attn.layers: {layers!r} name a layer twice")
        kv_heads = one.get("num_kv_heads") or heads
        for name, value in (("num_heads", heads), ("num_kv_heads", kv_heads)):
            if type(value) is not int or value < 1:
                raise ValueError(f"attn.{name}: {value!r} is no number of heads")
        if hidden_size % heads or heads % kv_heads or hidden_size // heads % 2:
            raise ValueError(f"attn: {heads} heads and {kv_heads} key heads do not divide a width of {hidden_size}")
        window, theta = one.get("window_size"), one.get("rope_theta")
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(f"attn.window_size: {window!r} is no number of tokens")
        spec = AttentionSpec(
            layers=tuple(layers),
            num_heads=heads,
            num_kv_heads=kv_heads,
            qkv_bias=bool(one.get("qkv_bias", False)),
            qk_norm=bool(one.get("qk_norm", False)),
            window=window,
            rope_theta=10000.0 if theta is None else float(theta),
        )
        found |= dict.fromkeys(spec.layers, spec)
    return found


@dataclass(frozen=True)
class Sight:
    """Who sees whom in one call, for every attention layer.

    Attributes:
        past: P. positions: [B or 1, T], each token's distance from its document's start.
        padding: [B, S] bool, True on tokens, or None. documents: [B, S] or None, which document a token is of.
        starts: [B] or None, where in the cached text the last document of each row starts.
    """

    past: int
    positions: Tensor
    padding: Tensor | None
    documents: Tensor | None
    starts: Tensor | None

    @classmethod
    def of(
        cls, tokens: int, attention_mask: Tensor | None, cache_layer: Any, reset: Tensor | None, device: Any
    ) -> Sight:
        """From a call's arguments and one attention layer of its cache (None without a cache).

        Args:
            tokens: T. attention_mask: [B, S], 0 on padding, or [B, T] of this call's tokens alone. reset: [B, T] bool.
        """
        past = cache_layer.get_seq_length() if cache_layer is not None else 0
        before = getattr(cache_layer, "document_start", None) if past else None
        index = torch.arange(past, past + tokens, device=device)[None]
        padding = None
        if attention_mask is not None and attention_mask.ndim == 2:
            padding = attention_mask[:, -(past + tokens) :].bool()
            if padding.shape[1] < past + tokens:  # of this call's tokens alone: the cached ones are taken as text
                padding = F.pad(padding, (past + tokens - padding.shape[1], 0), value=True)
            if not torch.compiler.is_compiling() and bool(padding.all()):
                padding = None
        if reset is None and before is None:
            return cls(past, index, padding, None, None)
        rows = index if reset is None else index.expand(reset.shape[0], -1)
        starts = before if before is not None else torch.zeros(rows.shape[0], dtype=torch.long, device=device)
        first = starts[:, None].expand(-1, tokens)
        if reset is not None:
            first = torch.maximum(first, torch.where(reset, rows, -1).cummax(dim=1).values)
        # a document is known by the index of its first token
        cached = torch.arange(past, device=device)
        documents = torch.where(cached >= starts[:, None], starts[:, None], -1)
        return cls(past, rows - first, padding, torch.cat([documents, first], dim=1), first[:, -1])

    def mask(self, window: int | None) -> Tensor | None:
        """[B or 1, 1, T, S] bool, True where a token sees another; None where causality alone says."""
        tokens = self.positions.shape[1]
        if window is not None and self.past + tokens <= window:
            window = None
        if self.padding is None and self.documents is None and window is None and (self.past == 0 or tokens == 1):
            return None
        device = self.positions.device
        query = torch.arange(self.past, self.past + tokens, device=device)[:, None]
        key = torch.arange(self.past + tokens, device=device)
        seen = (key <= query)[None]
        if window is not None:
            seen = seen & (query - key < window)
        if self.documents is not None:
            seen = seen & (self.documents[:, -tokens:, None] == self.documents[:, None, :])
        if self.padding is not None:
            # padding sees itself, so that no row is empty; nothing else sees it
            seen = (seen & self.padding[:, None, :]) | (key == query)
        return seen[:, None]


class Attention(nn.Module):
    """One layer's attention.

    Its cache layer gives the keys of all P tokens before, or of the last of them alone: with a window, W - 1.
    """

    def __init__(self, spec: AttentionSpec, hidden_size: int, layer_idx: int) -> None:
        super().__init__()
        self.spec = spec
        self.layer_idx = layer_idx
        self.head_dim = hidden_size // spec.num_heads
        keys = spec.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(hidden_size, keys, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(hidden_size, keys, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if spec.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, 1e-5)
            self.k_norm = RMSNorm(self.head_dim, 1e-5)

    def forward(self, hidden_states: Tensor, sight: Sight, cache: Any = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the cache's layer is updated."""
        q, k, v = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.spec.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (self._turned(x, sight.positions) for x in (q, k))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
            cache.layers[self.layer_idx].document_start = sight.starts
        mask = sight.mask(self.spec.window)
        if mask is not None:
            mask = mask[..., -k.shape[2] :]
        repeats = self.spec.num_heads // self.spec.num_kv_heads
        k, v = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1)
        return self.o_proj(o.transpose(1, 2).flatten(2))

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate [B, heads, T, d] by its tokens' positions; in float32, returned in x's dtype."""
        half = self.head_dim // 2
        exponent = torch.arange(half, device=x.device, dtype=torch.float32) / half
        angle = positions[:, None, :, None].float() / self.spec.rope_theta**exponent
        cos, sin = angle.cos().to(wide(x).dtype), angle.sin().to(wide(x).dtype)
        a, b = wide(x).split(half, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
