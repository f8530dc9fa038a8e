"""What pretraining tells: lines as it goes, and files of figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write_report(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
