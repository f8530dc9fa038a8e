"""Lets transformers know the ``surgery_*`` model types in programs that do not import surgery, such as ``lm_eval`` or
``transformers serve``.

transformers and lm-eval have no group of entry points for models. torch has one for what is to be imported with it,
``torch.backends``, and calls this at the end of its own import: in no program that does without torch, and for about a
millisecond. ``SURGERY_AUTOLOAD=0`` turns it off, and ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` all such entry points.
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Import surgery, which registers the model types. A failure is a warning: torch is imported all the same."""
    if os.environ.get("SURGERY_AUTOLOAD") == "0":
        return
    try:
        import surgery  # noqa: F401
    except Exception as error:
        import warnings

        warnings.warn(f"surgery cannot be imported, so its models are not known: {error}", stacklevel=2)
