"""A hybrid's attention where a battery does not look: caches of packed texts, windows, beams, padding in between."""

from __future__ import annotations

import pytest
import torch
from hosts_battery import apart, left_padded
from transformers import DynamicCache

from surgery.models.attention import Attention, AttentionSpec, Sight, attention_specs

HYBRIDS = ["gated_deltanet-hybrid", "gated_deltanet-hybrid-first"]


@pytest.fixture(params=HYBRIDS)
def hybrid(request, cases, tmp_path):
    """A hybrid model, 4 layers."""
    from surgery import hosts

    cases[request.param].write(tmp_path)
    return hosts.load_model(tmp_path, dtype=torch.float32)


@pytest.fixture
def hybrid_of(cases, tmp_path):
    """Factory: a hybrid of 3 layers with these attention layers in float64, and its upstream."""
    from surgery import hosts

    def make(attn):
        example = cases["gated_deltanet-hybrid"]
        example.write(tmp_path)
        config = hosts.read_config(tmp_path) | {"attn": attn, "num_hidden_layers": 3}
        hosts.adapter_for(config).build(config).save_pretrained(tmp_path)
        return hosts.load_model(tmp_path, dtype=torch.float64), example.upstream(tmp_path)

    return make


def test_a_packed_text_goes_on_from_its_last_document(hybrid):
    text = torch.randint(3, 256, (2, 30))
    reset = torch.zeros(2, 18, dtype=torch.bool)
    reset[0, [0, 5, 13]] = True  # the rows' last documents start at 13 and 7
    reset[1, [0, 7]] = True
    with torch.no_grad():
        cache = hybrid(text[:, :18], reset=reset, use_cache=True).cache
        parts = [hybrid(piece, cache=cache, use_cache=True).logits for piece in text[:, 18:].split([1, 8, 3], dim=1)]
        logits = torch.cat(parts, dim=1)
        for row, start in ((0, 13), (1, 7)):
            alone = hybrid(text[row : row + 1, start:]).logits[0, 18 - start :]
            assert apart(logits[row], alone) < 1e-5
            assert apart(logits[row], hybrid(text[row : row + 1]).logits[0, 18:]) > 1e-3


def test_a_document_that_starts_in_a_later_call(hybrid):
    text = torch.randint(3, 256, (1, 20))
    reset = torch.zeros(1, 8, dtype=torch.bool)
    reset[0, 3] = True
    with torch.no_grad():
        cache = hybrid(text[:, :9], use_cache=True).cache
        second = hybrid(text[:, 9:17], cache=cache, reset=reset, use_cache=True).logits
        third = hybrid(text[:, 17:], cache=cache, use_cache=True).logits
        assert apart(second[:, :3], hybrid(text[:, :12]).logits[:, 9:]) < 1e-5
        assert apart(torch.cat([second[:, 3:], third], 1), hybrid(text[:, 12:]).logits) < 1e-5


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_and_without_cache(hybrid, beams):
    text = torch.randint(3, 256, (2, 12))
    options = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False}
    options["attention_mask"] = left_padded(text, [8, 12])
    cached = hybrid.generate(text, use_cache=True, **options)
    assert torch.equal(cached, hybrid.generate(text, use_cache=False, **options))
    assert cached.shape[1] > 13


def test_a_cache_of_the_configuration_knows_both_kinds_of_layers(hybrid):
    kinds = {
        "DynamicLayer": "full_attention",
        "DynamicSlidingWindowLayer": "sliding_attention",
        "LinearAttentionLayer": "linear_attention",
    }
    cache = DynamicCache(config=hybrid.config)
    layers = [kinds[type(layer).__name__] for layer in cache.layers]
    assert layers == hybrid.config.layer_types and {"full_attention", "linear_attention"} <= set(layers)
    with torch.no_grad():
        hybrid(torch.randint(3, 256, (1, 7)), cache=cache, use_cache=True)
    assert cache.get_seq_length() == 7


def layer(index, window=None):
    return {"layers": [index], "num_heads": 2} | ({} if window is None else {"window_size": window})


# attention layers of a hybrid -> how many tokens' keys each keeps in the cache, None for all
WINDOWS = {
    "one window": ([layer(1, 5), layer(2)], {1: 4, 2: None}),
    "windows alone": ([{**layer(0, 6), "layers": [0, 2]}], {0: 5, 2: 5}),
    "a window of one token": ([layer(1, 1)], {1: None}),  # transformers' layer of none keeps all
    "two windows": ([layer(0, 5), layer(2, 9)], {0: None, 2: None}),  # transformers' cache knows one
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("pieces", [[3, *[1] * 21], [3, 11, 1, 1, 7, 1], [20, 1, 1, 1, 1]])
def test_decoding_past_a_window(name, pieces, hybrid_of):
    """The model written out, which reads the whole text at once, says what each piece's logits are."""
    attn, kept = WINDOWS[name]
    model, upstream = hybrid_of(attn)
    text = torch.randint(3, 256, (2, sum(pieces)))
    mask = left_padded(text, [sum(pieces) - 2, sum(pieces)])
    cache, logits, seen = DynamicCache(config=model.config), [], 0
    with torch.no_grad():
        for piece in text.split(pieces, dim=1):
            seen += piece.shape[1]
            logits.append(model(piece, attention_mask=mask[:, :seen], cache=cache, use_cache=True).logits)
        expected = upstream(text, mask).logits
    assert apart(torch.cat(logits, 1)[mask.bool()], expected[mask.bool()]) < 1e-5
    assert {index: cache.layers[index].keys.shape[2] for index in kept} == {
        index: sum(pieces) if tokens is None else tokens for index, tokens in kept.items()
    }
    assert cache.get_seq_length() == sum(pieces)


def test_a_window_is_not_written_into_the_configuration(hybrid_of):
    model, _ = hybrid_of([layer(1, 5)])
    assert model.config.sliding_window == 5
    assert not {"sliding_window", "layer_types"} & set(model.config.to_dict())
    other = type(model.config).from_dict(model.config.to_dict() | {"sliding_window": 3})
    assert other.sliding_window == 5 and other.to_dict()["sliding_window"] == 3


def test_padding_between_documents_is_seen_by_nobody():
    """Padding anywhere: what the others compute is what they compute without it."""
    spec = AttentionSpec(layers=(0,), num_heads=4, num_kv_heads=2, window=6)
    attention = Attention(spec, 32, 0).double()
    kept = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0, 1, 1]]).bool()
    x = torch.randn(1, 10, 32, dtype=torch.float64)
    changed = torch.where(kept[..., None], x, torch.randn_like(x))
    sight = Sight.of(10, kept, None, None, "cpu")
    with torch.no_grad():
        assert torch.equal(attention(x, sight)[kept], attention(changed, sight)[kept])
        assert attention(x, sight).isfinite().all()


def test_gradient_checkpointing_keeps_the_gradients(hybrid):
    text = torch.randint(3, 256, (2, 16))
    hybrid.train()
    hybrid(text, labels=text).loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in hybrid.named_parameters()}
    hybrid.zero_grad()
    hybrid.gradient_checkpointing_enable({"use_reentrant": False})
    hybrid(text, labels=text).loss.backward()
    for name, parameter in hybrid.named_parameters():
        assert (parameter.grad - plain[name]).norm() <= 1e-5 * plain[name].norm() + 1e-12, name


def test_defaults_of_the_specification():
    found = attention_specs({"layers": [2], "num_heads": 4}, 32, 3)
    assert found == {2: AttentionSpec(layers=(2,), num_heads=4, num_kv_heads=4, rope_theta=10000.0)}
    assert attention_specs(None, 32, 3) == {} == attention_specs([], 32, 3)


@pytest.mark.parametrize(("attn", "message"), [
    ("all", "no mapping"), ({"layers": [0]}, "num_heads"), ({"layers": [True], "num_heads": 2}, "attn.layers"),
    ({"layers": [0], "num_heads": 3}, "do not divide"), ({"layers": [0], "num_heads": 4, "num_kv_heads": 3}, "do not"),
    ({"layers": [0], "num_heads": 4, "window_size": 0}, "window_size"),
])  # fmt: skip
def test_what_a_specification_cannot_say(attn, message):
    with pytest.raises(ValueError, match=message):
        attention_specs(attn, 32, 3)
