"""Mixers that take a host mixer's place: the host's parameters under their own names, another memory inside.

What a graft adds lives under ``memory.``. With the host's own rule plugged in, a graft computes the host's mixer.
"""

from surgery.graft.base import Graft
from surgery.graft.gated_delta import GatedDeltaGraft
from surgery.graft.mamba2 import Mamba2Graft
from surgery.graft.variance import read_variances

__all__ = ["GatedDeltaGraft", "Graft", "Mamba2Graft", "read_variances"]
