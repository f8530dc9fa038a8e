"""Results as JSON that every reader takes: without the numbers that JSON does not have."""

from __future__ import annotations

import json
import math
from typing import Any


def strict(value: Any) -> Any:
    """``value`` with non-finite numbers replaced by None and tuples by lists, so that it is JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value


def shown(value: float | None, digits: int) -> str:
    """Write a figure of a report that may have been read back from JSON, which has null for one that is not finite."""
    return "inf" if value is None else f"{value:.{digits}f}"


def json_text(value: Any) -> str:
    """The same as indented text."""
    return json.dumps(strict(value), indent=2, allow_nan=False)
