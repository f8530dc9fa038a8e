"""Every host family, asked the same: see ``battery.py``. A graft that holds the host's own rule is the host's mixer."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from hosts_battery import apart, left_padded, raw_tensors, read_tensor
from transformers import AutoModelForCausalLM

from surgery import hosts
from surgery.data.tokens import Tokens
from surgery.inspection.horizon import horizon, measure_horizons
from surgery.operation import apply
from surgery.recipe import load_recipe
from surgery.revert import revert

LENGTH = 37


@pytest.fixture
def adapter(case_base):
    return hosts.adapter_for(hosts.read_config(case_base))


@pytest.fixture
def model(case_base):
    return hosts.load_model(case_base, dtype=torch.float32)


@pytest.fixture
def upstream(case, case_base):
    return case.upstream(case_base)


@pytest.fixture
def text():
    return torch.randint(3, 256, (2, LENGTH))


@pytest.fixture
def recipe(tmp_path, case, case_base):
    """Factory: the recipe of a rule at dose 0 on the case's base."""

    def make(rule, layers=None):
        path = tmp_path / f"{rule}.yaml"
        layers = list(layers or case.swapped)
        path.write_text(f"model: {case_base}\nlayers: {layers}\nmemory: {{rule: {rule}}}\n")
        return load_recipe(path)

    return make


def test_logits_equal_upstream(case, model, upstream, text):
    with torch.no_grad():
        assert apart(model(text).logits, upstream(text).logits) < case.tolerance


def test_padding_equals_upstream(case, model, upstream, text):
    mask = left_padded(text, [LENGTH - 6, LENGTH])
    with torch.no_grad():
        logits = model(text, attention_mask=mask).logits[mask.bool()]
        alone = torch.cat([upstream(row[None, kept.bool()]).logits[0] for row, kept in zip(text, mask, strict=True)])
        assert apart(logits, alone) < case.tolerance
        if case.masks:
            assert apart(logits, upstream(text, attention_mask=mask).logits[mask.bool()]) < case.tolerance
        assert apart(model(text).logits[mask.bool()], alone) > 1e-3  # the padding would be read otherwise


def test_packed_documents_equal_each_alone(case, model, upstream):
    model.to(case.dtype)  # a bare mixer with a short text magnifies rounding: 3e-5 in a rare draw
    documents = [torch.randint(3, 256, (1, length)) for length in (9, 2, 17, 1)]
    packed = torch.cat(documents, dim=1)
    reset = torch.zeros_like(packed, dtype=torch.bool)
    reset[0, torch.tensor([0, 9, 11, 28])] = True
    with torch.no_grad():
        expected = torch.cat([upstream(document).logits for document in documents], dim=1)
        assert apart(model(packed, reset=reset).logits, expected) < case.tolerance
        assert apart(model(packed).logits, expected) > 1e-2


def test_decoding_equals_the_full_forward(case, model, upstream, text):
    """In pieces and token by token, with and without padding in front."""
    mask = left_padded(text, [LENGTH - 4, LENGTH])
    with torch.no_grad():
        whole = upstream(text).logits
        alone = torch.cat([upstream(row[None, kept.bool()]).logits[0] for row, kept in zip(text, mask, strict=True)])
        for given, expected in ((None, whole), (mask, alone)):
            cache, parts, seen = None, [], 0
            for piece in text.split([9, 1, 12, *[1] * (LENGTH - 22)], dim=1):
                seen += piece.shape[1]
                out = model(
                    piece, cache=cache, use_cache=True, attention_mask=None if given is None else given[:, :seen]
                )
                cache = out.cache if hasattr(out, "cache") else out.past_key_values
                parts.append(out.logits)
            logits = torch.cat(parts, dim=1)
            assert apart(logits if given is None else logits[mask.bool()], expected) < case.tolerance


def test_a_later_token_changes_nothing_before_it(model, text):
    changed = text.clone()
    changed[:, 20] = (changed[:, 20] + 7) % 256
    with torch.no_grad():
        before, after = model(text).logits, model(changed).logits
    assert apart(after[:, :20], before[:, :20]) < 1e-6
    assert apart(after[:, 20:], before[:, 20:]) > 1e-3


def test_gradients_equal_upstream(case, model, upstream, text):
    if not case.learnt:
        pytest.skip("upstream has no gradients here")
    mask = left_padded(text, [LENGTH - 6, LENGTH]) if case.masks else torch.ones_like(text)
    weights = torch.randn(int(mask.sum()), upstream(text[:, :1]).logits.shape[-1])
    for one in (model.to(case.dtype), upstream):
        one.zero_grad()
        (one(text, attention_mask=mask).logits[mask.bool()] * weights).sum().backward()
    theirs = dict(upstream.named_parameters())
    compared = 0
    for name, parameter in model.named_parameters():
        expected = theirs[case.upstream_name(name)].grad
        if parameter.grad is None and expected is None:
            continue
        assert apart(parameter.grad, case.part(name, expected)) < case.gradient_tolerance, name
        compared += 1
    assert compared >= 8 * len(case.layers)


def test_inspect_measures_what_the_tensors_give(case, case_base, adapter, model):
    """alpha_t of every layer and head, from the tensors on disk and what upstream's mixer of that layer reads."""
    config = hosts.read_config(case_base)
    assert adapter.mixer_layers(config) == list(case.layers)
    upstream = case.upstream(case_base)
    ids = torch.randint(3, 256, (50,))
    taken = {}

    def keep(layer):
        def hook(module, args, kwargs):
            taken[layer] = args[0] if args else kwargs["hidden_states"]

        return hook

    named = {id(module): name for name, module in model.named_modules()}
    for layer, mixer in adapter.mixers(model).items():
        theirs = upstream.get_submodule(case.upstream_name(named[id(mixer)] + ".")[:-1])
        theirs.register_forward_pre_hook(keep(layer), with_kwargs=True)
    with torch.no_grad():
        upstream(ids[None])
        figures = measure_horizons(model, adapter.mixers(model), Tokens(ids, torch.arange(1, 51), "random"))
    assert [figure.layer for figure in figures] == list(case.layers)
    for figure in figures:
        read = partial(read_tensor, case_base, prefix=adapter.tensor_prefix(config, figure.layer))
        with torch.no_grad():
            decay = case.log_decay(read, taken[figure.layer])
        expected = horizon(decay[0]).mean(0)
        if expected.ndim == 2:  # a decay for each key channel
            expected = expected.mean(-1)
        assert apart(torch.tensor(figure.heads), expected) < 1e-4
        assert abs(figure.alpha - decay.double().exp().mean().item()) < 1e-6


@pytest.mark.parametrize("rule", ["host", "palimpsa", "bayesian"])
def test_apply_at_dose_zero(case, case_base, recipe, rule, tmp_path, text):
    out = tmp_path / "out"
    report = apply(recipe(rule), out)
    assert report.plan.exact == (rule in case.exact)
    if report.plan.exact:
        assert report.drift["kl"] < 1e-6
    else:
        assert report.plan.reason and report.drift["kl"] > 1e-6
    before, after = raw_tensors(case_base), raw_tensors(out)
    assert {name: after[name] for name in before} == before
    config = hosts.read_config(out)
    adapter = hosts.adapter_for(config)
    assert config["model_type"] == adapter.model_types[1] != adapter.model_types[0]
    prefixes = tuple(adapter.tensor_prefix(config, layer) + "memory." for layer in case.swapped)
    assert all(name.startswith(prefixes) for name in after.keys() - before.keys())
    loaded = AutoModelForCausalLM.from_pretrained(out).eval()
    loaded.generation_config.eos_token_id = None  # random weights may choose it
    generated = loaded.generate(text, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(text))
    uncached = loaded.generate(
        text, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(text), use_cache=False
    )
    assert torch.equal(generated, uncached) and generated.shape == (2, LENGTH + 5)

    back = revert(str(out), tmp_path / "back")
    assert back.identical and raw_tensors(tmp_path / "back") == before
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    given = json.loads((case_base / "config.json").read_text())
    assert hosts.decode_floats(written) == hosts.decode_floats(given)
    if rule == "host":
        restored = hosts.load_model(tmp_path / "back", dtype=torch.float32)
        with torch.no_grad():
            assert torch.equal(restored(text).logits, hosts.load_model(case_base, dtype=torch.float32)(text).logits)


def test_a_swapped_model_keeps_the_contract(case, recipe, tmp_path, text):
    """At dose 1, where the memories differ from the host's: packed, padded and in pieces as in one go."""
    out = tmp_path / "out"
    rule = "bayesian" if len(case.exact) == 3 else "palimpsa"
    apply(recipe(rule), out, drift="skip")
    model = hosts.load_model(out, dtype=torch.float32)
    adapter = hosts.adapter_for(hosts.read_config(out))
    plain = model(text).logits.detach()
    for layer in case.swapped:
        memory = adapter.mixers(model)[layer].memory
        memory.dose.fill_(1.0)
        with torch.no_grad():
            for parameter in memory.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    mask = left_padded(text, [LENGTH - 6, LENGTH])
    reset = torch.zeros_like(text, dtype=torch.bool)
    reset[:, [0, 11]] = True
    with torch.no_grad():
        expected = model(text).logits
        assert apart(expected, plain) > 1e-3
        first = model(text[:, :10], use_cache=True)
        cache = first.cache if hasattr(first, "cache") else first.past_key_values
        rest = [model(piece, cache=cache, use_cache=True).logits for piece in text[:, 10:].split([1, LENGTH - 11], 1)]
        assert apart(torch.cat([first.logits, *rest], 1), expected) < 1e-5
        alone = torch.cat([model(text[:, :11]).logits, model(text[:, 11:]).logits], 1)
        assert apart(model(text, reset=reset).logits, alone) < 1e-5
        assert apart(model(text, attention_mask=mask).logits[0, 6:], model(text[:1, 6:]).logits[0]) < 1e-5


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_export_reloads_and_generates(case, recipe, tmp_path, text, monkeypatch, fresh):
    """In a process of its own in the slow form, which runs the code beside the weights; here in the quick one."""
    from surgery.export import verify
    from surgery.export.run import export

    def reload_here(directory, ids, code):
        return verify.model_logits(AutoModelForCausalLM.from_pretrained(directory), ids)

    if not fresh:
        monkeypatch.setattr(verify, "reload_logits", reload_here)
    rule = "bayesian" if "bayesian" in case.exact else "palimpsa"
    apply(recipe(rule), tmp_path / "applied", drift="skip")
    done = export(str(tmp_path / "applied"), tmp_path / "exported", dtype="float32")
    assert done.check.bit_exact and done.source.swap["layers"] == list(case.swapped)
    before, after = raw_tensors(tmp_path / "applied"), raw_tensors(tmp_path / "exported")
    ties = done.source.adapter.ties(done.source.checkpoint.config)
    assert after.keys() <= before.keys() <= after.keys() | ties.keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    loaded.generation_config.eos_token_id = None
    assert loaded.generate(text, max_new_tokens=3, do_sample=False).shape == (2, LENGTH + 3)


def test_a_reload_is_bit_exact(case, case_base, model, tmp_path, text):
    """A base loaded, saved and loaded again, in its own layout: the same tensors under the same names."""
    model.save_pretrained(tmp_path / "again")
    before, after = raw_tensors(case_base), raw_tensors(tmp_path / "again")
    config = hosts.read_config(case_base)
    adapter = hosts.adapter_for(config)
    lost = {name for name in before.keys() - after.keys() if not adapter.is_unused(name)}
    assert lost <= adapter.ties(config).keys()
    for name in after.keys() & before.keys():
        assert after[name][1] == before[name][1] and after[name][2] == before[name][2], name
    again = hosts.load_model(tmp_path / "again", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(text).logits, model(text).logits)
