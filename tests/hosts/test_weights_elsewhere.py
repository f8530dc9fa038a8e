"""Weights are used where they live: offloaded, quantised, adapted or sharded, a model gives what it gives without its
fused paths."""

from __future__ import annotations

import math

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hosts_battery import apart
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize
from transformers import DynamicCache

from surgery import hosts
from surgery.graft import Graft
from surgery.graft.short_conv import CausalConv1d

LENGTH = 23
CPU = torch.device("cpu")
# every parameter of the memories: two rules for each style, one of them with a projection of its own
RULES = {"host": ("host", {}), "palimpsa": ("palimpsa", {}), "bayesian": ("bayesian", {"noise_from": "token"})}


@pytest.fixture(params=[pytest.param("host", marks=pytest.mark.slow), "palimpsa", "bayesian"])
def build(request, case, case_base):
    """Factory: the case's model with two swapped layers at dose 1, its weights the same each time."""
    rule, options = RULES[request.param]
    config = hosts.read_config(case_base)
    adapter = hosts.adapter_for(config)
    layers = list(case.swapped)
    swap = {"schema": 1, "rule": rule, "layers": layers, "options": options, "base": "tiny"}
    tensors = hosts.load_model(case_base, dtype=torch.float32).state_dict()
    seed = int(torch.randint(2**31, ()))

    def make():
        torch.manual_seed(seed)
        model = adapter.build(adapter.surgery_config(config, swap)).float().eval()
        model.load_state_dict(tensors, strict=False)
        model.tie_weights()
        for layer in layers:
            memory = adapter.mixers(model)[layer].memory
            memory.reset_parameters("paper")
            with torch.no_grad():
                for parameter in memory.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
        return model

    return make


@pytest.fixture
def text():
    return torch.randint(3, 64, (2, LENGTH))


@torch.no_grad()
def read(model, text):
    """Return the logits of a text packed, padded and read in pieces."""
    reset = torch.zeros_like(text, dtype=torch.bool)
    reset[0, [0, 5, 6]], reset[1, 11] = True, True
    mask = torch.ones_like(text)
    mask[0, :4] = 0
    cache, parts = DynamicCache(config=model.config), []
    for piece in text.split([9, 1, LENGTH - 10], dim=1):
        parts.append(model(piece, use_cache=True, cache=cache).logits)
    return [
        model(text, reset=reset).logits, model(text, attention_mask=mask).logits[:, 4:], torch.cat(parts, dim=1),
    ]  # fmt: skip


def same(found, expected):
    assert all(x.isfinite().all() for x in expected)
    assert [torch.equal(x, y) for x, y in zip(found, expected, strict=True)] == [True] * len(expected)


def near(found, expected, tolerance=1e-5):
    assert all(x.isfinite().all() for x in expected)
    assert max(apart(x, y) for x, y in zip(found, expected, strict=True)) < tolerance


def test_offloaded_weights_give_the_same_bits(build, text, tmp_path):
    expected = read(build(), text)
    same(read(accelerate.cpu_offload(build(), CPU), text), expected)
    same(read(accelerate.disk_offload(build(), tmp_path / "all", CPU), text), expected)
    model = build()
    layers = next(name for name, part in model.named_modules() if isinstance(part, nn.ModuleList))
    trunk = layers.rpartition(".")[0]
    places = {f"{trunk}.{name}": "cpu" for name, _ in model.get_submodule(trunk).named_children()} | {"lm_head": "cpu"}
    del places[layers]
    blocks = range(len(model.get_submodule(layers)))
    places |= {f"{layers}.{index}": "cpu" if index == 1 else "disk" for index in blocks}
    model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path / "some")
    same(read(model, text), expected)


@pytest.mark.slow
def test_offloaded_weights_of_a_compiled_model(build, text):
    """torch.compile breaks its graphs where accelerate's hooks move weights; what it makes agrees to rounding."""
    with torch.no_grad():
        expected = build()(text).logits
        torch.compiler.reset()
        model = accelerate.cpu_offload(build(), CPU)
        found = torch.compile(model, backend="eager")(text).logits
    assert all(parameter.is_meta for parameter in model.parameters())
    near([found], [expected])


class Called(nn.Module):
    """A module of which there is nothing to read."""

    def __init__(self, module):
        super().__init__()
        self._call = module.forward

    def forward(self, x):
        return self._call(x)


def test_quantised_products_are_called(build, text):
    def quantised():
        return torch.ao.quantization.quantize_dynamic(build(), {nn.Linear}, dtype=torch.qint8)

    model = quantised()
    for name, part in list(model.named_modules()):
        if isinstance(part, torch.ao.nn.quantized.dynamic.Linear):
            model.set_submodule(name, Called(part))
    expected = read(model, text)
    same(read(quantised(), text), expected)
    assert apart(expected[0], read(build(), text)[0]) > 1e-4


class Adapted(nn.Module):
    """A module with something beside it, and no weight of its own to read."""

    def __init__(self, module, delta):
        super().__init__()
        self.module, self.delta = module, delta

    def forward(self, x):
        return self.module(x) + beside(self.module, self.delta, x)


class Sum(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.delta = delta

    def forward(self, weight):
        return weight + self.delta


def beside(module, delta, x):
    if isinstance(module, nn.Linear):
        return F.linear(x, delta)
    return F.conv1d(x, delta, padding=module.padding, groups=module.groups)


def adapt(model, how):
    """A change of low rank to each product and convolution, always the same one; ``merged`` into the weights or beside
    them."""
    generator = torch.Generator().manual_seed(3)
    chosen = [(name, part) for name, part in model.named_modules() if type(part) in (nn.Linear, CausalConv1d)]
    for name, part in chosen:
        rows, columns = part.weight.flatten(1).shape
        low, high = (torch.randn(n, 1, generator=generator) for n in (rows, columns))
        delta = (0.2 * low @ high.T / math.sqrt(columns)).reshape(part.weight.shape)
        if how == "merged":
            part.weight = nn.Parameter(part.weight.detach() + delta)
        elif how == "wrapped":
            model.set_submodule(name, Adapted(part, delta))
        elif how == "hooked":
            part.register_forward_hook(lambda module, args, out, delta=delta: out + beside(module, delta, args[0]))
        else:
            parametrize.register_parametrization(part, "weight", Sum(delta))
    return model


@pytest.mark.parametrize(
    "how", ["wrapped", *(pytest.param(how, marks=pytest.mark.slow) for how in ("hooked", "parametrised"))]
)
def test_adapters_on_products_and_convolutions_count(build, text, how):
    expected = read(adapt(build(), "merged"), text)
    near(read(adapt(build(), how), text), expected, 1e-4)
    assert apart(expected[0], read(build(), text)[0]) > 1e-2


@pytest.fixture(scope="module")
def mesh():
    if dist.is_initialized():
        pytest.skip("another test holds the process group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("parts", ["leaves", pytest.param("mixers", marks=pytest.mark.slow)])
def test_shards_are_gathered_first(build, text, mesh, parts):
    expected, model = read(build(), text), build()
    for graft in [part for part in model.modules() if isinstance(part, Graft)]:
        for part in reversed(list(graft.modules())):  # from the leaves up, the mixer last
            if part is graft or (parts == "leaves" and part._parameters):
                fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    near(read(model, text), expected)
