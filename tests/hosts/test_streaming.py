"""Every host family read from the disk block by block: the same model, and nothing of it kept."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from surgery import hosts
from surgery.hosts.streaming import load_streamed
from surgery.inspection.probe import probe_layers
from surgery.memory import draw_memory
from surgery.memory.modules import device_of


@pytest.fixture
def adapter(case_base):
    return hosts.adapter_for(hosts.read_config(case_base))


@pytest.fixture
def text():
    return torch.randint(3, 256, (2, 29))


def held(model: nn.Module) -> int:
    """Parameters that are in memory."""
    return sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)


def test_streamed_equals_whole(case_base, adapter, text):
    whole = adapter.load(case_base, dtype=torch.float32)
    streamed = load_streamed(adapter, case_base, dtype=torch.float32)
    assert device_of(streamed) == device_of(whole) == torch.device("cpu")
    largest = max(sum(parameter.numel() for parameter in block.parameters()) for block in adapter.blocks(whole))
    inside = []
    for mixer in adapter.mixers(streamed).values():
        mixer.register_forward_hook(lambda *_: inside.append(held(streamed)))
    with torch.no_grad():
        for _ in range(2):  # what a first pass drops, a second fetches again
            assert torch.equal(streamed(text).logits, whole(text).logits)
            assert held(streamed) == 0
    assert len(inside) == 2 * len(adapter.mixers(whole))
    assert min(inside) > 0 and max(inside) <= largest


def test_half_precision_streams_as_it_loads(case_base, adapter, text, tmp_path):
    """Computed in float32, everything that the weights do not hold is in float32 too."""
    for path in case_base.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, tmp_path)
    config = json.loads((case_base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    tensors = load_file(case_base / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = adapter.load(tmp_path, dtype=torch.float32)
    streamed = load_streamed(adapter, tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(streamed(text).logits, whole(text).logits)


def test_a_mixer_alone_is_streamed(case_base, adapter, text):
    whole = adapter.mixers(adapter.load(case_base, dtype=torch.float32))
    streamed = load_streamed(adapter, case_base, dtype=torch.float32, unit="mixer")
    with torch.no_grad():
        for layer, mixer in adapter.mixers(streamed).items():
            hidden = torch.randn(1, 13, whole[layer].geometry.hidden_size)
            assert torch.equal(mixer(hidden), whole[layer](hidden))
    assert held(streamed) == 0


def test_a_probe_is_the_swap_alone(case, case_base, adapter):
    """KL at dose 1, from the swapped layer on, is that of a model with that layer swapped, streamed or not."""
    config = hosts.read_config(case_base)
    layer = case.layers[-1]
    ids = torch.randint(3, 256, (2, 23))
    model = adapter.load(case_base, dtype=torch.float32)
    found = probe_layers(model, adapter, config, ids, "bayesian", layers=[layer], seed=5)
    streamed = load_streamed(adapter, case_base, dtype=torch.float32)
    assert probe_layers(streamed, adapter, config, ids, "bayesian", layers=[layer], seed=5) == found
    with torch.no_grad():
        base = model(ids).logits[:, :-1].double().log_softmax(-1)
        mixer = adapter.mixers(model)[layer]
        mixer.memory = draw_memory("bayesian", mixer.geometry, {}, "exact", 5, layer)
        mixer.memory.dose.fill_(1.0)
        after = model(ids).logits[:, :-1].double().log_softmax(-1)
    kl = float((base.exp() * (base - after)).sum(-1).mean())
    [probed] = found.layers
    assert probed.layer == layer and probed.slope != 0
    assert abs(probed.kl - kl) < 1e-3 * kl + 1e-9
