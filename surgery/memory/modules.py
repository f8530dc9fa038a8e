"""Tells where a module's weights may be read past the module's own call, and in which dtype a module computes.

A stranger may change how a module is called: accelerate replaces its ``forward`` and keeps its weights elsewhere
between calls, LoRA and quantisation put another module in its place, a parametrisation changes its class, FSDP leaves
shards in it. Whatever reads a weight without calling the module (fused products, joined convolutions, compiled mixers,
recorded steps) asks :func:`plain`, or :func:`watched` and :func:`resident`, first. Whatever reads what a module holds
outside of its forward pass does so within :func:`fetched`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # what a product is computed in; no float8


def plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether ``module`` is exactly a ``kind``, and reading its weights gives what its call would use."""
    return type(module) is kind and not watched(module) and not all_hooked() and resident(module)


def all_hooked() -> bool:
    """Whether torch calls hooks around every module there is."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def hooked(module: nn.Module) -> bool:
    """Whether torch calls hooks around ``module``."""
    its = module.__dict__
    return bool(
        its["_forward_hooks"]
        or its["_forward_pre_hooks"]
        or its["_backward_hooks"]
        or its["_backward_pre_hooks"]
    )


def replaced(module: nn.Module) -> bool:
    """Whether ``module`` runs another forward than its class's (accelerate's hooks do that), or is parametrised."""
    its = module.__dict__
    forward = its.get("forward")
    if forward is not None and not (
        # accelerate, when it takes its hooks away, leaves the class's own method in the module
        getattr(forward, "__self__", None) is module and forward.__func__ is type(module).forward
    ):
        return True
    return "_hf_hook" in its or "parametrizations" in its["_modules"]


def watched(module: nn.Module) -> bool:
    """Whether calling ``module`` does more than the forward pass of its class."""
    its = module.__dict__  # looked into once: a recorded step asks this of every module before each replay
    return bool(
        its["_forward_hooks"]
        or its["_forward_pre_hooks"]
        or its["_backward_hooks"]
        or its["_backward_pre_hooks"]
        or "_hf_hook" in its
        or (("forward" in its or "parametrizations" in its["_modules"]) and replaced(module))
    )


def resident(module: nn.Module) -> bool:
    """Whether the tensors that ``module`` itself holds are here and whole: not on meta, no shard, no subclass."""
    its = module.__dict__
    for held in (its["_parameters"], its["_buffers"]):
        for x in held.values():
            if x is not None and (x.is_meta or type(x) not in (nn.Parameter, Tensor)):
                return False
    return True


def require_loaded(module: nn.Module, x: Tensor) -> None:
    """Refuse to compute with weights that are on the meta device: torch's products and convolutions then return what
    happens to lie in memory.

    Modules below whose call does more than their forward pass may fetch their weights first, and are left to do so.

    Raises:
        RuntimeError: ``module`` or one below it holds a parameter on meta, and ``x`` is not.
    """
    if x.is_meta or torch.compiler.is_compiling():
        return
    its = module.__dict__
    for name, held in its["_parameters"].items():
        if held is not None and held.is_meta:
            raise RuntimeError(
                f"{type(module).__name__}.{name} is on the meta device: it was never loaded, or it is offloaded and "
                "the module was not called as one; load the weights, or call the module itself"
            )
    for below in its["_modules"].values():
        if below is not None and not watched(below):
            require_loaded(below, x)


@contextmanager
def fetched(module: nn.Module) -> Iterator[None]:
    """Within it the tensors that ``module`` itself holds are where it computes, if accelerate keeps them elsewhere."""
    hook = module.__dict__.get("_hf_hook")
    if hook is None:
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its inputs, wherever its weights are kept."""
    for module in model.modules():  # of an offloaded model, the outermost hook need not know it
        hook = module.__dict__.get("_hf_hook")
        for one in getattr(hook, "hooks", (hook,)):
            if getattr(one, "execution_device", None) is not None:
                return torch.device(one.execution_device)
    return next(model.parameters()).device


def in_dtype_of(module: nn.Module, x: Tensor) -> Tensor:
    """``x`` in the dtype of the module's weight; as it is where the module has no floating-point weight."""
    weight = getattr(module, "weight", None)  # a quantised module's is a method, or integers
    if isinstance(weight, Tensor) and weight.dtype in FLOATS:
        return x.to(weight.dtype)
    return x.to(next((held.dtype for held in module.parameters() if held.dtype in FLOATS), x.dtype))
