"""transformers' ``bamba``."""

from __future__ import annotations

from surgery.hosts.hybrid import HybridAdapter


class BambaAdapter(HybridAdapter):
    """Bamba: ``model.layers.i.mamba.*`` among attention layers."""

    name = "bamba"
    class_name = "Bamba"
    title = "Bamba"
    checkpoints = ("ibm-ai-platform/Bamba-9B-v2",)
    style = "additive"
