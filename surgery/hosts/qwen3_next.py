"""transformers' ``qwen3_next``."""

from __future__ import annotations

from surgery.hosts.hybrid import HybridAdapter


class Qwen3NextAdapter(HybridAdapter):
    """Qwen3-Next: ``model.layers.i.linear_attn.*`` among attention layers, each followed by experts. The tensors under
    ``mtp`` (prediction of several tokens at once) are read by nothing here and kept."""

    name = "qwen3_next"
    class_name = "Qwen3Next"
    title = "Qwen3-Next"
    checkpoints = ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Thinking")
    style = "delta"
