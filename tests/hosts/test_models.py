"""The models of both families: cache, generation, packing, padding, precision, reloading, training."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from surgery import hosts
from surgery.graft import GatedDeltaGraft, Mamba2Graft


def test_mamba2_logits_equal_upstream(bases, text):
    model = hosts.load_model(bases["mamba2"])
    upstream = hosts.load_model(bases["mamba2"], implementation="upstream")
    assert type(upstream).__module__.startswith("transformers.")
    assert all(isinstance(mixer, Mamba2Graft) for mixer in hosts.ADAPTERS[0].mixers(model).values())
    mask = torch.ones_like(text)
    mask[0, :5] = 0
    with torch.no_grad():
        for options in ({}, {"attention_mask": mask}, {"labels": text}, {"output_hidden_states": True}):
            mine, theirs = model(text, **options), upstream(text, **options)
            assert (mine.logits - theirs.logits).norm() < 1e-5 * theirs.logits.norm()
            if mine.loss is not None:
                assert torch.isclose(mine.loss, theirs.loss, rtol=1e-5)
            for one, other in zip(mine.hidden_states or (), theirs.hidden_states or (), strict=True):
                assert (one - other).norm() < 1e-5 * other.norm()


def test_mamba2_generates_as_upstream(bases, text):
    model = hosts.load_model(bases["mamba2"])
    upstream = hosts.load_model(bases["mamba2"], implementation="upstream")
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(text)}
    assert torch.equal(model.generate(text, **options), upstream.generate(text, **options))


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_and_without_cache(upgraded, text, beams):
    mask = torch.ones_like(text)
    mask[0, :5] = 0
    options = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False, "attention_mask": mask}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    cached = upgraded.generate(text, use_cache=True, **options)
    full = upgraded.generate(text, use_cache=False, **options)
    assert torch.equal(cached.sequences, full.sequences)
    for one, other in zip(cached.scores, full.scores, strict=True):
        kept = torch.isfinite(other)
        assert torch.allclose(one[kept], other[kept], atol=1e-4)


def test_a_long_text_in_pieces(upgraded, text):
    with torch.no_grad():
        expected = upgraded(text).logits
        cache, parts = None, []
        for piece in text.split((11, 1, 3, 22), dim=1):
            out = upgraded(piece, cache=cache, use_cache=True)
            cache = out.cache
            parts.append(out.logits)
    assert isinstance(cache, DynamicCache)
    assert (torch.cat(parts, dim=1) - expected).norm() < 1e-5 * expected.norm()


def test_packed_equals_separate(upgraded):
    documents = [torch.randint(3, 64, (1, length)) for length in (9, 2, 17)]
    packed = torch.cat(documents, dim=1)
    reset = torch.zeros_like(packed, dtype=torch.bool)
    reset[0, torch.tensor([0, 9, 11])] = True
    with torch.no_grad():
        expected = torch.cat([upgraded(document).logits for document in documents], dim=1)
        logits = upgraded(packed, reset=reset).logits
        assert (logits - expected).norm() < 1e-5 * expected.norm()
        assert (upgraded(packed).logits - expected).norm() > 1e-2 * expected.norm()


def test_padded_equals_unpadded(upgraded, text):
    padded = torch.cat([torch.full((2, 6), 7), text], dim=1)
    mask = torch.cat([torch.zeros(2, 6, dtype=torch.long), torch.ones_like(text)], dim=1)
    with torch.no_grad():
        expected = upgraded(text).logits
        logits = upgraded(padded, attention_mask=mask).logits[:, 6:]
    assert (logits - expected).norm() < 1e-5 * expected.norm()


def test_refuses_packing_it_would_ignore(model, text):
    with pytest.raises(ValueError, match="mark the first token"):
        model(text, cu_seq_lens_q=torch.tensor([0, 10]))
    model(text, position_ids=torch.arange(37)[None], num_items_in_batch=3)


def test_logits_to_keep_and_tuple(model, text):
    with torch.no_grad():
        every = model(text).logits
        for kept, expected in ((1, every[:, -1:]), (torch.tensor([3, 5]), every[:, [3, 5]])):
            torch.testing.assert_close(model(text, logits_to_keep=kept).logits, expected)
        assert torch.equal(model(text, return_dict=False, use_cache=False)[0], every)
        embedded = model(inputs_embeds=model.get_input_embeddings()(text)).logits
    assert torch.equal(embedded, every)


def test_loss_is_normalised_by_the_tokens_of_the_batch(model, text):
    mean = model(text, labels=text).loss
    summed = model(text, labels=text, num_items_in_batch=torch.tensor(10)).loss
    assert torch.isclose(summed, mean * text[:, 1:].numel() / 10)


def test_reload_is_bit_exact(upgraded, text, tmp_path):
    with torch.no_grad():
        for parameter in upgraded.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
        for layer in (0, 2):
            hosts.adapter_for(upgraded.config.to_dict()).mixers(upgraded)[layer].memory.dose.fill_(0.375)
        expected = upgraded(text).logits
    upgraded.save_pretrained(tmp_path)
    for again in (AutoModelForCausalLM.from_pretrained(tmp_path), hosts.load_model(tmp_path)):
        assert type(again) is type(upgraded)
        state = upgraded.state_dict()
        assert state.keys() == again.state_dict().keys()
        for name, tensor in again.state_dict().items():
            assert torch.equal(tensor, state[name]), name
        with torch.no_grad():
            assert torch.equal(again.eval()(text).logits, expected)


def test_half_precision_keeps_decays_and_dose(upgraded, text, tmp_path):
    upgraded.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = hosts.load_model(tmp_path).to(torch.bfloat16)
    for model in (loaded, cast):
        assert model.lm_head.weight.dtype == torch.bfloat16
        for name, tensor in model.state_dict().items():
            if name.endswith(("A_log", "dt_bias", "memory.dose")):
                assert tensor.dtype == torch.float32, name
                assert torch.equal(tensor, upgraded.state_dict()[name]), name
    with torch.no_grad():
        first, second = loaded.eval()(text).logits, cast.eval()(text).logits
    assert torch.equal(first, second)
    drift = (first - upgraded(text).logits).norm() / first.norm()
    assert 0 < drift < 0.1


def test_only_swapped_layers_add_tensors(upgraded, base):
    added = upgraded.state_dict().keys() - hosts.load_model(base).state_dict().keys()
    assert added and all(".memory." in name for name in added)
    assert {int(name.split(".layers.")[1].split(".")[0]) for name in added} == {0, 2}


def test_gradients_and_checkpointing(upgraded, text):
    upgraded.train()
    upgraded(text, labels=text).loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in upgraded.named_parameters() if parameter.requires_grad}
    upgraded.zero_grad()
    upgraded.gradient_checkpointing_enable({"use_reentrant": False})
    out = upgraded(text, labels=text, use_cache=True)
    assert out.cache is None
    out.loss.backward()
    for name, grad in plain.items():
        other = upgraded.get_parameter(name).grad
        assert (other - grad).norm() <= 1e-5 * grad.norm() + 1e-12, name
    with pytest.raises(ValueError, match="gradient checkpointing"):
        upgraded(text, cache=DynamicCache(config=upgraded.config))


def test_traces_without_a_break(base, text):
    """One graph for forward and loss: nothing in Python depends on a tensor's values."""
    config = hosts.read_config(base) | {"num_hidden_layers": 1}
    model = hosts.adapter_for(config).build(config)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    mask = torch.ones_like(text)
    mask[0, :5] = 0
    reset = torch.zeros_like(text, dtype=torch.bool)
    reset[1, 20] = True
    options = {"labels": text, "attention_mask": mask, "reset": reset, "use_cache": False}
    expected = model(text, **options).loss
    assert torch.isclose(compiled(text, **options).loss, expected, rtol=1e-5)


def test_autocast_trains_float32_weights(upgraded, text):
    upgraded.train()
    expected = upgraded(text, labels=text).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = upgraded(text, labels=text).loss
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isclose(loss, expected, rtol=0.03)
    assert all(parameter.grad.dtype == torch.float32 for parameter in upgraded.parameters() if parameter.requires_grad)


def test_ties_share_storage(family, base, tmp_path):
    config = hosts.read_config(base) | {"tie_word_embeddings": True}
    adapter = hosts.adapter_for(config)
    model = adapter.build(config)
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    model.save_pretrained(tmp_path)
    again = hosts.load_model(tmp_path)
    assert again.lm_head.weight.data_ptr() == again.get_input_embeddings().weight.data_ptr()
    assert "lm_head.weight" not in adapter.expected_tensors(config)
    assert adapter.ties(config)["lm_head.weight"] in adapter.expected_tensors(config)


def test_config_is_strict_json(upgraded, tmp_path):
    upgraded.save_pretrained(tmp_path)

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    config = json.loads((tmp_path / "config.json").read_text(), parse_constant=refuse)
    assert config["surgery"]["layers"] == [0, 2]
    if config["model_type"] == "surgery_mamba2":
        assert type(upgraded.config).from_pretrained(tmp_path).time_step_limit[1] == float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 3}, "schema"),
        ({"layers": [0, 0]}, "distinct"),
        ({"layers": [3]}, "distinct"),
        ({"rule": None}, "no memory rule"),
    ],
)
def test_refuses_a_surgery_it_cannot_read(family, base, change, message, swapped_in):
    config = hosts.read_config(base)
    adapter = hosts.adapter_for(config)
    written = adapter.surgery_config(config, swapped_in("palimpsa") | change)
    with pytest.raises(hosts.base.UsageError, match=message):
        adapter.parse(written)


def test_fresh_weights_are_finite_and_spread(family, base):
    config = hosts.read_config(base)
    adapter = hosts.adapter_for(config)
    model = adapter.build(config)
    for name, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all(), name
    for mixer in adapter.mixers(model).values():
        assert isinstance(mixer, (Mamba2Graft, GatedDeltaGraft))
        step = torch.nn.functional.softplus(mixer.dt_bias)
        assert step.min() >= 1e-4 * 0.99 and step.max() <= 0.1 * 1.01
        assert mixer.A_log.unique().numel() == mixer.A_log.numel()
