"""Run a model that need not fit into memory: each block's tensors are read when it runs and dropped when it has run.

transformers maps a model's tensors to where they lie in the checkpoint's safetensors files, whatever it renames on
loading, and accelerate's hooks fetch and drop them around each block's forward pass, which stays the model's own. Only
tensors that transformers converts on loading (experts that it stacks) are written once more, into a temporary directory
that lives as long as the model.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from surgery.errors import JobError
from surgery.hosts.base import HostAdapter

Unit = Literal["block", "mixer"]


def load_streamed(
    adapter: HostAdapter,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    unit: Unit = "block",
) -> nn.Module:
    """As :meth:`HostAdapter.load`, with the weights left in the checkpoint and streamed to ``device``.

    Args:
        dtype: what to compute in; None for the checkpoint's own.
        unit: what is read at once; ``mixer`` where mixers are called on their own.

    Returns:
        A model to run forward only: there are no weights to train between two calls.

    Raises:
        UsageError, JobError: as :meth:`HostAdapter.load`.
    """
    from accelerate.hooks import (
        AlignDevicesHook,
        add_hook_to_module,
        attach_align_device_hook,
        remove_hook_from_submodules,
    )
    from accelerate.utils import OffloadedWeightsLoader

    converted = tempfile.TemporaryDirectory(prefix="surgery-converted-")
    # two devices, the second of no module: accelerate before 1.15 refuses to leave a whole model on the disk
    placement = {"device_map": {"": "disk", "no module": "cpu"}, "offload_folder": converted.name}
    # a cast on loading would read every tensor once to no purpose; to float32, where all goes, it is made on fetching
    late = dtype == torch.float32
    log = logging.getLogger("accelerate.big_modeling")  # would warn of what was asked for
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*no module")
            model = adapter.load(path, dtype=None if late else dtype, placement=placement)
    finally:
        log.setLevel(level)
    index = _index(model)
    remove_hook_from_submodules(model)
    if late:
        model.float()
    for name, tensor in model.state_dict().items():
        if name in index:
            index[name] = {**index[name], "dtype": str(tensor.dtype).removeprefix("torch.")}
        elif tensor.is_meta:
            raise JobError(f"{path}: {name} cannot be streamed\n  run on a machine that holds the whole model")
    units = list(adapter.blocks(model) if unit == "block" else adapter.mixers(model).values())
    attach_align_device_hook(
        model,
        execution_device=torch.device(device),
        offload=True,
        weights_map=OffloadedWeightsLoader(index=index),
        # a block's tensors are read at once, and not each module's own as it runs
        preload_module_classes=sorted({type(module).__name__ for module in units}),
    )
    add_hook_to_module(model, AlignDevicesHook(execution_device=torch.device(device)), append=True)
    for module in units:
        module.register_forward_hook(_return_memory)
    model.converted_weights = converted  # removed with the model
    return model


def _return_memory(*_: Any) -> None:
    """Give what a block freed back to the system, where the C library would keep it: at 64 blocks of 40M parameters it
    keeps 2 GB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _index(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Name in memory -> file, name in it and dtype, as transformers gave it to accelerate."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            weights = getattr(one, "weights_map", None)
            if weights is not None:
                return dict(weights.dataset.index)
    return {}
