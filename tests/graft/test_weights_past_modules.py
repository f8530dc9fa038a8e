"""Weights are read past their modules only where these are plain; nothing computes with weights that are not there."""

from __future__ import annotations

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_module
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrizations, prune

from surgery.graft import GatedDeltaGraft, Mamba2Graft, compiling
from surgery.graft.kda import KimiDeltaGraft
from surgery.graft.packed_delta import FlatDeltaGraft, InterleavedDeltaGraft
from surgery.memory import MemoryGeometry, create
from surgery.memory.modules import plain

CPU = torch.device("cpu")
GRAFTS = {
    "mamba2": (Mamba2Graft, MemoryGeometry("additive", 24, 4, 2, 8, 12)),
    "gated": (GatedDeltaGraft, MemoryGeometry("delta", 24, 4, 2, 8, 12)),
    "flat": (FlatDeltaGraft, MemoryGeometry("delta", 24, 4, 2, 8, 12)),
    "interleaved": (InterleavedDeltaGraft, MemoryGeometry("delta", 24, 4, 2, 8, 12)),
    "kimi": (KimiDeltaGraft, MemoryGeometry("delta", 24, 4, 4, 8, 8, channel_decay=True)),
}


@pytest.fixture(params=GRAFTS)
def graft(request):
    graft, geometry = GRAFTS[request.param]
    return graft(create("palimpsa", geometry))


@pytest.fixture
def hidden():
    return torch.randn(2, 9, 24)


def on_meta(module):
    """Leave the module's own parameters without values."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(parameter.to("meta")))
    return module


class Half(nn.Linear):
    def forward(self, x):
        return 0.5 * super().forward(x)


class Marked(torch.Tensor):
    """A tensor subclass, as quantised and sharded weights are."""


def another_forward(module):
    module.forward = lambda x: x


def another_tensor(module):
    module.weight = nn.Parameter(torch.randn(8, 8).as_subclass(Marked))


CHANGES = {
    "a forward hook": lambda module: module.register_forward_hook(lambda *_: None),
    "a hook before": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "a backward hook": lambda module: module.register_full_backward_hook(lambda *_: None),
    "a backward hook before": lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    "another forward": another_forward,
    "accelerate's hooks": lambda module: accelerate.cpu_offload(module, CPU),
    "a parametrisation": parametrizations.orthogonal,
    "pruning": lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
    "meta": on_meta,
    "a tensor subclass": another_tensor,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_module_is_not_plain(change):
    module = nn.Linear(8, 8)
    assert plain(module, nn.Linear) and not plain(Half(8, 8), nn.Linear)
    change(module)
    assert not plain(module, nn.Linear)


def test_a_module_is_plain_again():
    """Without the hooks, of which accelerate leaves a trace."""
    module = accelerate.cpu_offload(nn.Linear(8, 8), CPU)
    remove_hook_from_module(module, recurse=True)
    module.weight, module.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))
    assert plain(module, nn.Linear)
    other = nn.Linear(8, 8)
    other.forward = module.forward
    assert not plain(other, nn.Linear)


@pytest.mark.parametrize("where", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_hooks_on_every_module_count(where, graft, hidden):
    """All of a mixer's own modules are called while someone watches all modules."""
    seen = set()
    handle = getattr(torch_module, f"register_module_{where}")(lambda module, *_: seen.add(module))
    try:
        with compiling.compiled_mixers():
            graft(1 * hidden.requires_grad_()).sum().backward()
    finally:
        handle.remove()
    assert seen >= {module for module in graft.modules() if isinstance(module, (nn.Linear, nn.Conv1d))}


def test_weights_on_meta_never_compute(graft, hidden):
    """Neither the mixer's own, nor those of any module in it, nor in its call, nor where its inputs are asked for."""
    holders = [module for module in graft.modules() if any(True for _ in module.parameters(recurse=False))]
    assert len(holders) > 6
    for holder in holders:
        kept = dict(holder.named_parameters(recurse=False))
        on_meta(holder)
        for call in (graft, graft.inputs):
            with pytest.raises(RuntimeError, match="is on the meta device"):
                call(hidden)
        with compiling.compiled_mixers(), pytest.raises(RuntimeError, match="is on the meta device"):
            graft(hidden)
        for name, parameter in kept.items():
            setattr(holder, name, parameter)
    assert graft(hidden).isfinite().all()


@pytest.mark.parametrize("compiled", [False, True])
def test_an_offloaded_mixer_is_not_compiled(graft, hidden, monkeypatch, compiled):
    monkeypatch.setattr(type(graft.memory), "compiles", lambda self, device: True)
    monkeypatch.setattr(compiling, "run", lambda *_: pytest.fail("compiled"))
    with torch.no_grad():
        expected = graft(hidden)
        accelerate.cpu_offload(graft, CPU)
        assert all(parameter.is_meta for parameter in graft.parameters())
        with compiling.compiled_mixers(compiled):
            assert torch.equal(graft(hidden), expected)


def test_inputs_of_an_offloaded_mixer(graft, hidden):
    with torch.no_grad():
        expected = vars(graft.inputs(hidden))
        found = vars(accelerate.cpu_offload(graft, CPU).inputs(hidden))
    assert graft.A_log.is_meta
    tensors = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6 and all(torch.equal(found[name], expected[name]) for name in tensors)


def test_an_offloaded_mixer_inside_a_compiled_model(hidden):
    made, geometry = GRAFTS["gated"]
    graft = made(create("host", geometry))
    with torch.no_grad():
        expected = graft(hidden)
        torch.compiler.reset()
        found = torch.compile(accelerate.cpu_offload(nn.Sequential(graft), CPU), backend="eager")(hidden)
    assert graft.A_log.is_meta
    torch.testing.assert_close(found, expected)
