"""Hybrids with Mamba-2 mixers: what only they are asked beside the battery."""

from __future__ import annotations

import json

import pytest
import torch
from hosts_battery import apart, left_padded, raw_tensors, write_recipe
from hosts_case_hybrids_mamba2 import BY_NAME, CHOSEN
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surgery import hosts
from surgery.errors import UsageError
from surgery.evaluation.perplexity import Reader, evaluating
from surgery.operation import apply
from surgery.recipe import load_recipe


@pytest.fixture(scope="session", params=CHOSEN)
def hybrid(request):
    return BY_NAME[request.param]


@pytest.fixture(scope="session")
def base(hybrid, base_of):
    return base_of(hybrid)


@pytest.fixture
def text():
    return torch.randint(3, 256, (2, 37))


@pytest.fixture
def upgraded(hybrid, base):
    """A model with two swapped layers at dose 1, started from the base."""
    config = hosts.read_config(base)
    adapter = hosts.adapter_for(config)
    swap = {"schema": 1, "rule": "bayesian", "layers": list(hybrid.swapped), "options": {}, "base": "tiny"}
    made = adapter.build(adapter.surgery_config(config, swap)).eval()
    made.load_state_dict(hosts.load_model(base, dtype=torch.float32).state_dict(), strict=False)
    with torch.no_grad():
        for layer in hybrid.swapped:
            memory = adapter.mixers(made)[layer].memory
            memory.reset_parameters("paper")
            memory.dose.fill_(1.0)
    return made


# models


def test_fresh_grafts_have_upstreams_initial_weights(hybrid, base):
    """Not the zeros that they are made of: transformers initialises a module through the model right around it."""
    config = hosts.read_config(base)
    adapter = hosts.adapter_for(config)
    torch.manual_seed(3)
    model = adapter.build(config)
    torch.manual_seed(3)
    upstream = adapter._upstream()(adapter.parse(config))
    for layer, name in adapter._paths(config).items():
        ours, theirs = adapter.mixers(model)[layer], upstream.get_submodule(name)
        assert torch.equal(ours.A_log, theirs.A_log) and torch.equal(ours.D, theirs.D)
        assert ours.A_log.abs().sum() > 0
        if theirs.dt_bias.unique().numel() == 1:
            assert torch.equal(ours.dt_bias, theirs.dt_bias)
        else:  # drawn log-uniformly from the same range
            for step in (torch.nn.functional.softplus(mixer.dt_bias) for mixer in (ours, theirs)):
                assert 0.9 * min(config["time_step_min"], 0.1) < step.min() and step.max() < 1.1 * 0.3
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_and_without_cache(upgraded, text, beams):
    options = {"max_new_tokens": 5, "num_beams": beams, "do_sample": False}
    options |= {"attention_mask": left_padded(text, [31, 37])}
    cached, full = (upgraded.generate(text, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, full) and cached.shape == (2, 42)


def test_recomputed_gradients_of_packed_documents(upgraded, text):
    reset = torch.zeros_like(text, dtype=torch.bool)
    reset[:, [0, 9, 20]] = True
    upgraded.train()
    upgraded(text, labels=text, reset=reset).loss.backward()
    plain = {name: p.grad.clone() for name, p in upgraded.named_parameters() if p.grad is not None}
    upgraded.zero_grad()
    getattr(upgraded, "activation_checkpointing_enable", upgraded.gradient_checkpointing_enable)()
    upgraded(text, labels=text, reset=reset).loss.backward()
    assert len(plain) > 30
    for name, gradient in plain.items():
        assert (upgraded.get_parameter(name).grad - gradient).norm() <= 1e-5 * gradient.norm() + 1e-12, name


def test_packing_that_would_be_ignored_is_refused(upgraded, text):
    with pytest.raises(ValueError, match="mark the first token"):
        upgraded(text, seq_idx=torch.zeros_like(text))
    reset = torch.zeros_like(text, dtype=torch.bool)
    out = upgraded(text, use_cache=True)
    cache = out.cache if hasattr(out, "cache") else out.past_key_values
    with pytest.raises(ValueError, match="reset or a cache"):
        upgraded(text, reset=reset, cache=cache)


def test_padding_among_packed_documents(upgraded, text):
    """Padding at the end of a row, as examples of unequal lengths are packed."""
    reset = torch.zeros_like(text, dtype=torch.bool)
    reset[:, [0, 12]] = True
    mask = torch.ones_like(text)
    mask[:, 30:] = 0
    with torch.no_grad():
        expected = torch.cat([upgraded(part).logits for part in (text[:, :12], text[:, 12:30])], dim=1)
        assert apart(upgraded(text, reset=reset, attention_mask=mask).logits[:, :30], expected) < 1e-5


def test_a_saved_model_reloads_bit_for_bit(upgraded, hybrid, text, tmp_path):
    with torch.no_grad():
        for parameter in upgraded.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        expected = upgraded(text).logits
    upgraded.save_pretrained(tmp_path)
    state = upgraded.state_dict()
    for again in (AutoModelForCausalLM.from_pretrained(tmp_path), hosts.load_model(tmp_path)):
        assert type(again) is type(upgraded) and again.config.surgery["layers"] == list(hybrid.swapped)
        assert again.state_dict().keys() == state.keys()
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, state[name]), name
        with torch.no_grad():
            assert torch.equal(again.eval()(text).logits, expected)


def test_half_precision_keeps_decays_and_memories(upgraded, text, tmp_path):
    upgraded.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    cast = hosts.load_model(tmp_path).to(torch.bfloat16)
    wide = ("A_log", "dt_bias", "memory.dose")
    for model in (loaded, cast):
        assert model.lm_head.weight.dtype == torch.bfloat16
        found = {name: tensor for name, tensor in model.state_dict().items() if name.endswith(wide)}
        assert len(found) >= 6 + 2
        for name, tensor in found.items():
            assert tensor.dtype == torch.float32 and torch.equal(tensor, upgraded.state_dict()[name]), name
    with torch.no_grad():
        drift = apart(loaded(text).logits, upgraded(text).logits)
    assert 0 < drift < 0.2


def test_logits_are_the_scaled_head_of_the_trunk(hybrid, base, text):
    config = hosts.read_config(base)
    adapter = hosts.adapter_for(config)
    model = hosts.load_model(base, dtype=torch.float32)
    with torch.no_grad():
        hidden = adapter.backbone(model)(input_ids=text).last_hidden_state
        assert apart(adapter.head(model)(hidden) * adapter.logit_scale(config), model(text).logits) < 1e-6
    assert len(adapter.blocks(model)) == adapter.parse(config).num_hidden_layers


def test_the_static_estimate_is_the_gate_at_zero_input(hybrid, base):
    config = hosts.read_config(base)
    adapter = hosts.adapter_for(config)
    estimate = adapter.static_log_decay(load_file(base / "model.safetensors"), config)
    model = hosts.load_model(base, dtype=torch.float32)
    assert sorted(estimate) == list(hybrid.layers)
    for layer, mixer in adapter.mixers(model).items():
        torch.testing.assert_close(estimate[layer], mixer.inputs(torch.zeros(1, 1, 32)).log_decay[0, 0])


def test_a_stream_reads_what_one_window_does(upgraded):
    ids = torch.randint(3, 256, (1, 96))
    with evaluating(upgraded):
        whole = Reader(upgraded).read(ids, carry=False)
        reader = Reader(upgraded)
        parts = [reader.read(piece, carry=True) for piece in ids.split([32, 1, 63], dim=1)]
    assert apart(torch.cat(parts, dim=1), whole) < 1e-5


# families


def test_a_swap_of_a_layer_without_a_mixer_is_refused(tmp_path, base, hybrid):
    astray = set(range(hosts.adapter_for(hosts.read_config(base)).parse(hosts.read_config(base)).num_hidden_layers))
    astray -= set(hybrid.layers)
    if not astray:
        pytest.skip("every layer of this family holds a mixer")
    recipe = load_recipe(write_recipe(tmp_path, base, sorted(astray)[:1]))
    with pytest.raises(UsageError, match="layer"):
        apply(recipe, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bamba-plain", {"hidden_act": "gelu"}, "hidden_act"),
        ("bamba-plain", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("granitemoehybrid-experts", {"hidden_act": "gelu"}, "hidden_act"),
        ("zamba2-adapters", {"n_mamba_heads": 7}, "n_mamba_heads"),
        ("zamba2-adapters", {"mamba_ngroups": 3}, "mamba_ngroups"),
        ("falcon_h1-no-norm-bias-tied", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("nemotron_h-bias", {"mamba_hidden_act": "relu"}, "mamba_hidden_act"),
        ("nemotron_h-bias", {"n_groups": 4}, "n_groups"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, name, change, message):
    BY_NAME[name].write(tmp_path)
    config = hosts.read_config(tmp_path) | change
    with pytest.raises(UsageError, match=message):
        hosts.adapter_for(config).parse(config)


def test_granite_packs_no_documents_for_flash_attention(tmp_path, text):
    BY_NAME["granitemoehybrid-dense"].write(tmp_path)
    model = hosts.load_model(tmp_path, dtype=torch.float32)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        model(text, reset=torch.zeros_like(text, dtype=torch.bool))


def test_nemotron_reads_the_pattern_of_its_checkpoints(tmp_path):
    """Configurations on the hub name the pattern, as a string, and a count of layers."""
    BY_NAME["nemotron_h-bias"].write(tmp_path)
    config = hosts.read_config(tmp_path)
    for key in ("layers_block_type", "layer_types"):
        config.pop(key, None)
    config |= {"hybrid_override_pattern": "M-M*-M", "num_hidden_layers": 6, "tie_word_embeddings": True}
    adapter = hosts.adapter_for(config)
    assert adapter.mixer_layers(config) == [0, 2, 5]
    assert adapter.tensor_prefix(config, 2) == "backbone.layers.2.mixer."
    assert adapter.ties(config) == {}
    written = adapter.surgery_config(config, {"schema": 1, "rule": "palimpsa", "layers": [2], "base": "x"})
    assert written["hybrid_override_pattern"] == "M-M*-M" and adapter.mixer_layers(written) == [0, 2, 5]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert torch.isfinite(hosts.load_model(tmp_path)(torch.arange(9)[None]).logits).all()


def test_nemotron_keeps_heads_that_nothing_reads(tmp_path):
    """Tensors for the prediction of several tokens at once, which transformers leaves on the disk."""
    base = tmp_path / "base"
    BY_NAME["nemotron_h-bias"].write(base)
    file = base / "model.safetensors"
    extra = {"mtp.layers.0.norm.weight": torch.randn(32)}
    save_file({**load_file(file), **extra}, file, metadata={"format": "pt"})
    assert hosts.adapter_for(hosts.read_config(base)).is_unused("mtp.layers.0.norm.weight")
    apply(load_recipe(write_recipe(tmp_path, base, [2])), tmp_path / "out", drift="skip")
    before, after = raw_tensors(base), raw_tensors(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    hosts.load_model(tmp_path / "out")


def test_falcon_gates_before_its_norm_where_its_configuration_says_so(tmp_path, text):
    case = BY_NAME["falcon_h1-norm-first"]
    case.write(tmp_path)
    config = hosts.read_config(tmp_path)
    found = []
    for first in (True, False):
        (tmp_path / "config.json").write_text(json.dumps(config | {"mamba_norm_before_gate": first}))
        with torch.no_grad():
            found.append(hosts.load_model(tmp_path, dtype=torch.float32)(text).logits)
            assert apart(found[-1], case.upstream(tmp_path)(text).logits) < 1e-5
    assert apart(*found) > 1e-2


def test_falcon_scales_are_there_after_every_way_of_making_a_model(tmp_path):
    """A buffer that no checkpoint holds."""
    BY_NAME["falcon_h1-no-norm-bias-tied"].write(tmp_path)
    config = hosts.read_config(tmp_path)
    adapter = hosts.adapter_for(config)
    made, loaded = adapter.build(config), hosts.load_model(tmp_path, dtype=torch.float32)
    inner, keys, heads = 2 * 32, 2 * 8, 8
    expected = torch.cat(
        [torch.full((n,), s) for n, s in zip((inner, inner, keys, keys, heads), config["ssm_multipliers"], strict=True)]
    )
    for model in (made, loaded):
        for mixer in adapter.mixers(model).values():
            assert torch.equal(mixer.mup_vector.flatten(), expected)
    assert not any("mup_vector" in name for name in loaded.state_dict())
