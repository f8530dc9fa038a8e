"""Lets the tests of this folder import the fuzzer, which is a script of its own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
