"""transformers' ``zamba2``."""

from __future__ import annotations

from surgery.hosts.hybrid import HybridAdapter


class Zamba2Adapter(HybridAdapter):
    """Zamba2: ``model.layers.i.mamba.*``, and ``model.layers.i.mamba_decoder.mamba.*`` after a shared block."""

    name = "zamba2"
    class_name = "Zamba2"
    title = "Zamba2"
    checkpoints = ("Zyphra/Zamba2-1.2B", "Zyphra/Zamba2-2.7B", "Zyphra/Zamba2-7B")
    style = "additive"
