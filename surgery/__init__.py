"""Model surgery: swap the memory of Mamba2, Gated DeltaNet and Kimi Delta Attention layers in pretrained
language models.

Importing this package makes ``AutoConfig`` and ``AutoModelForCausalLM`` know the ``surgery_*`` model types without
importing transformers: see :mod:`surgery.registration`.
"""

from surgery.registration import register

__version__ = "0.1.0"

register()
