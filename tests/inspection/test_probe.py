"""The probe: its slope against finite differences in float64, its drift against whole models, and what it leaves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from surgery.data.texts import load_text
from surgery.data.tokens import Tokens, encode
from surgery.errors import UsageError
from surgery.hosts import adapter_for, load_model, read_config, resolve
from surgery.hosts.streaming import load_streamed
from surgery.inspection.probe import probe_layers, probe_windows, swapped
from surgery.memory import draw_memory


@pytest.fixture(scope="module")
def windows():
    """Windows of the bundled text, in a bundled model's tokens."""

    def make(name, context=48, count=2):
        from surgery.evaluation.loading import load_tokenizer

        text = load_text("bundled", "train", None, limit=16 * count * context)
        return encode(load_tokenizer(resolve(f"bundled:{name}")), text, count * context).ids.view(count, context)

    return make


def loss_of(model, ids):
    """Mean next-token loss by the model's whole forward pass, in the model's dtype."""
    with torch.no_grad():
        hidden = model.base_model(ids).last_hidden_state
        logits = model.lm_head(hidden)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item(), logits.log_softmax(-1)


@pytest.mark.parametrize(
    # the step of the finite differences is exact in float32, as every dose is; the loss bends early where memories add
    # up, and late, but with more rounding to drown in, where they correct errors
    ("name", "rule", "step"),
    [("tiny-mamba2", "palimpsa", 2.0**-22), ("tiny-mamba2", "bayesian", 2.0**-22), ("tiny-gdn", "bayesian", 2.0**-14)],
)
def test_slope_and_drift_against_whole_models_in_float64(name, rule, step, windows):
    path, ids = resolve(f"bundled:{name}"), windows(name)
    config = read_config(path)
    adapter = adapter_for(config)
    layers = [1, adapter.mixer_layers(config)[-2]]
    model = load_model(path, dtype=torch.float64)
    found = probe_layers(model, adapter, config, ids, rule, layers=layers, seed=3)
    assert found.rule == rule and found.tokens == 2 * 47 and found.context == 48
    assert [one.layer for one in found.layers] == layers

    loss, base = loss_of(model, ids)
    assert found.loss == pytest.approx(loss, rel=1e-9)
    mixers = adapter.mixers(model)
    for one in found.layers:
        own = mixers[one.layer].memory
        memory = draw_memory(rule, adapter.geometry(config, one.layer), {}, "exact", 3, one.layer).double()
        mixers[one.layer].memory = memory
        losses = []
        for dose in (0.0, step, 2 * step, 1.0):
            memory.dose.fill_(dose)
            value, after = loss_of(model, ids)
            losses.append(value)
        mixers[one.layer].memory = own
        slope = (4 * losses[1] - 3 * losses[0] - losses[2]) / (2 * step)
        assert one.slope == pytest.approx(slope, rel=1e-4)
        kl = (base.exp() * (base - after)).sum(-1).mean().item()
        assert one.kl == pytest.approx(kl, rel=1e-6)

    # in float32 a slope is a sum of tokens that cancel, each rounded
    rounded = probe_layers(load_model(path, dtype=torch.float32), adapter, config, ids, rule, layers=layers, seed=3)
    for one, exact in zip(rounded.layers, found.layers, strict=True):
        assert one.slope == pytest.approx(exact.slope, rel=1e-2) and one.kl == pytest.approx(exact.kl, rel=1e-3)


@pytest.mark.parametrize("family", ["mamba2", "gated_deltanet"])
def test_the_model_is_left_as_it_was(make_checkpoint, family):
    path = make_checkpoint(family)
    config = read_config(path)
    adapter, model = adapter_for(config), load_model(path, dtype=torch.float32).train()
    model.lm_head.weight.requires_grad_(False)
    ids = torch.randint(0, 256, (2, 24))
    with torch.no_grad():
        before = model(ids).logits
    flags = [parameter.requires_grad for parameter in model.parameters()]
    memories = [mixer.memory for mixer in adapter.mixers(model).values()]
    generator = torch.get_rng_state()
    probe_layers(model, adapter, config, ids, "bayesian")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert [parameter.requires_grad for parameter in model.parameters()] == flags and model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(mixer.memory is memory for mixer, memory in zip(adapter.mixers(model).values(), memories, strict=True))
    assert not any("forward" in module.__dict__ or module._forward_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("family", ["mamba2", "gated_deltanet"])
@pytest.mark.parametrize("rule", ["palimpsa", "bayesian"])
def test_a_streamed_model_gives_the_same(make_checkpoint, family, rule):
    path = make_checkpoint(family)
    config = read_config(path)
    adapter, ids = adapter_for(config), torch.randint(0, 256, (2, 24))
    whole = probe_layers(load_model(path, dtype=torch.float32), adapter, config, ids, rule)
    streamed = load_streamed(adapter, path, dtype=torch.float32)
    assert probe_layers(streamed, adapter, config, ids, rule) == whole
    assert all(parameter.is_meta for parameter in streamed.parameters())


def test_only_layers_with_the_hosts_memory_are_probed(make_checkpoint):
    def probed(layers):
        path = make_checkpoint("mamba2", {"rule": "bayesian", "layers": layers}, name=f"swapped-{len(layers)}")
        config, ids = read_config(path), torch.randint(0, 256, (1, 16))
        model = load_model(path, dtype=torch.float32)
        return [one.layer for one in probe_layers(model, adapter_for(config), config, ids, "palimpsa").layers]

    assert probed([0, 2]) == [1, 3]
    with pytest.raises(UsageError, match="none to probe"):
        probed([0, 1, 2, 3])


def test_an_error_inside_leaves_the_memory(make_checkpoint):
    path = make_checkpoint()
    adapter = adapter_for(read_config(path))
    mixer = adapter.mixers(load_model(path))[1]
    own = mixer.memory
    memory = draw_memory("palimpsa", mixer.geometry, {}, "exact", 0, 1)
    with pytest.raises(ZeroDivisionError), swapped(mixer, memory):
        assert mixer.memory is memory and "memory" not in mixer._modules
        _ = 1 / 0
    assert mixer.memory is own and mixer._modules["memory"] is own


def test_windows_are_the_texts_beginning():
    ids = torch.arange(5000)
    tokens = lambda count: Tokens(ids[:count], torch.arange(1, count + 1), "counted")  # noqa: E731
    assert torch.equal(probe_windows(tokens(5000)), ids[:4096].view(8, 512))
    assert torch.equal(probe_windows(tokens(1200)), ids[:1024].view(2, 512))
    with pytest.raises(UsageError, match="512"):
        probe_windows(tokens(500))
