"""The Mamba-2 graft with the host's rule is transformers' mixer: outputs, gradients, padding, cache, packing."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, PreTrainedConfig


def both(upstream, graft, hidden, **options):
    """Outputs of both mixers and the gradients of one random functional of them, in parameters and input; in float64,
    since float32 gradients of few numbers that many tokens add to are off by up to 2e-5 in either of them."""
    weight = torch.randn_like(hidden, dtype=torch.float64)
    results = []
    for mixer in (graft, upstream):
        mixer.double().zero_grad()
        leaf = hidden.double().requires_grad_()
        out = mixer(leaf, **options)
        (out * weight).sum().backward()
        results.append((out, leaf.grad))
    return results


# one token and one head a group: the norm removes the memory's scale, and with it the gradient of dt
@pytest.mark.parametrize(
    ("groups", "batch", "tokens"), [(1, 1, 37), (1, 2, 1), (2, 3, 16), (2, 2, 1), (4, 1, 33), (4, 2, 50)]
)
def test_equals_upstream(mamba2_pair, close, groups, batch, tokens):
    upstream, graft, config = mamba2_pair(groups)
    hidden = torch.randn(batch, tokens, config.hidden_size)
    close(graft(hidden), upstream(hidden))
    (out, grad), (expected, expected_grad) = both(upstream, graft, hidden)
    close(out, expected)
    close(grad, expected_grad)
    close(graft, upstream)


def test_equals_upstream_with_biases(mamba2_pair, close):
    upstream, graft, config = mamba2_pair(use_bias=True, use_conv_bias=False, conv_kernel=3)
    (out, grad), (expected, expected_grad) = both(upstream, graft, torch.randn(2, 21, config.hidden_size))
    close(out, expected)
    close(grad, expected_grad)
    close(graft, upstream)


@pytest.mark.parametrize("left", [True, False])
def test_padding_equals_upstream(mamba2_pair, close, left):
    upstream, graft, config = mamba2_pair()
    mask = torch.ones(3, 29, dtype=torch.long)
    for row, padded in ((0, 9), (2, 2)):
        mask[row, slice(None, padded) if left else slice(29 - padded, None)] = 0
    hidden = torch.randn(3, 29, config.hidden_size)
    (out, grad), (expected, expected_grad) = both(upstream, graft, hidden, attention_mask=mask)
    close(out, expected)
    close(grad, expected_grad)
    close(graft, upstream)
    assert grad[mask == 0].abs().max() == 0


@pytest.mark.parametrize("use_bias", [False, True])
def test_padded_equals_unpadded(mamba2_pair, close, use_bias):
    _, graft, config = mamba2_pair(use_bias=use_bias)
    text = torch.randn(1, 20, config.hidden_size)
    padded = torch.cat([torch.randn(1, 7, config.hidden_size), text], dim=1)
    mask = torch.cat([torch.zeros(1, 7), torch.ones(1, 20)], dim=1)
    cache, alone = DynamicCache(config=config), DynamicCache(config=config)
    close(graft(padded, cache, mask)[:, 7:], graft(text, alone), 1e-6)
    close(cache.layers[0].recurrent_states[0], alone.layers[0].recurrent_states[0], 1e-6)
    step = torch.randn(1, 1, config.hidden_size)
    close(graft(step, cache), graft(step, alone), 1e-6)


@pytest.mark.parametrize("prefill", [1, 2, 5, 17])
def test_token_by_token_equals_upstream_in_one_go(mamba2_pair, close, prefill):
    upstream, graft, config = mamba2_pair()
    hidden = torch.randn(2, 24, config.hidden_size)
    with torch.no_grad():
        expected = upstream(hidden)
        cache = DynamicCache(config=config)
        parts = [graft(hidden[:, :prefill], cache)]
        parts += [graft(hidden[:, t : t + 1], cache) for t in range(prefill, 24)]
    close(torch.cat(parts, dim=1), expected)


def test_padded_prefill_then_tokens(mamba2_pair, close):
    upstream, graft, config = mamba2_pair()
    hidden = torch.randn(2, 24, config.hidden_size)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :6] = 0
    with torch.no_grad():
        expected = upstream(hidden, attention_mask=mask)
        cache = DynamicCache(config=config)
        parts = [graft(hidden[:, :10], cache, mask[:, :10])]
        parts += [graft(hidden[:, t : t + 1], cache, mask[:, : t + 1]) for t in range(10, 24)]
    close(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("cuts", [(3, 4, 30), (1, 3, 20), (16, 2, 22)])
def test_a_text_in_pieces_equals_upstream_in_one_go(mamba2_pair, close, cuts):
    upstream, graft, config = mamba2_pair()
    hidden = torch.randn(2, sum(cuts), config.hidden_size)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        parts = [graft(piece, cache=cache) for piece in hidden.split(cuts, dim=1)]
        close(torch.cat(parts, dim=1), upstream(hidden))


def test_continues_an_upstream_cache(mamba2_pair, close):
    upstream, graft, config = mamba2_pair()
    hidden = torch.randn(2, 20, config.hidden_size)
    with torch.no_grad():
        cache = DynamicCache(config=config)
        upstream(hidden[:, :13], cache)
        close(graft(hidden[:, 13:], cache), upstream(hidden)[:, 13:])


def test_packed_equals_upstream_on_each_document(mamba2_pair, close):
    upstream, graft, config = mamba2_pair()
    lengths = (5, 2, 3, 13, 11)  # also documents shorter than the convolution
    hidden = torch.randn(1, sum(lengths), config.hidden_size, dtype=torch.float64)
    graft.double(), upstream.double()  # as in both()
    weight = torch.randn_like(hidden)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    reset = torch.zeros(1, sum(lengths), dtype=torch.bool)
    reset[0, starts] = True
    packed = hidden.clone().requires_grad_()
    out = graft(packed, reset=reset)
    (out * weight).sum().backward()
    apart = hidden.clone().requires_grad_()
    expected = torch.cat([upstream(document) for document in apart.split(lengths, dim=1)], dim=1)
    (expected * weight).sum().backward()
    close(out, expected)
    close(packed.grad, apart.grad)
    close(graft, upstream)


@pytest.mark.parametrize("tail", [1, 2, 5])
def test_decodes_after_a_late_document_start(mamba2_pair, close, tail):
    upstream, graft, config = mamba2_pair()
    hidden = torch.randn(1, 20, config.hidden_size)
    reset = torch.zeros(1, 12, dtype=torch.bool)
    reset[0, 12 - tail] = True
    with torch.no_grad():
        cache = DynamicCache(config=config)
        graft(hidden[:, :12], cache, reset=reset)
        parts = [graft(hidden[:, t : t + 1], cache) for t in range(12, 20)]
        close(torch.cat(parts, dim=1), upstream(hidden[:, 12 - tail :])[:, tail:])


def test_a_document_starts_in_a_short_piece(mamba2_pair, close):
    upstream, graft, config = mamba2_pair()
    hidden = torch.randn(1, 16, config.hidden_size)
    with torch.no_grad():
        cache = DynamicCache(config=config)
        graft(hidden[:, :8], cache)
        first = graft(hidden[:, 8:9], cache, reset=torch.ones(1, 1, dtype=torch.bool))
        rest = graft(hidden[:, 9:], cache)
        close(torch.cat([first, rest], dim=1), upstream(hidden[:, 8:]))


def test_clamps_dt_in_every_form(mamba2_pair, close):
    limit = (0.3, 0.9)
    upstream, graft, config = mamba2_pair(time_step_limit=limit)
    hidden = torch.randn(2, 18, config.hidden_size)
    (out, grad), (expected, expected_grad) = both(upstream, graft, hidden)
    close(out, expected)
    close(grad, expected_grad)
    close(graft, upstream)
    graft.float()
    dt = graft.inputs(hidden).write.detach()
    assert dt.min() == pytest.approx(limit[0]) and dt.max() == pytest.approx(limit[1])
    with torch.no_grad():
        cache = DynamicCache(config=config)
        parts = [graft(hidden[:, t : t + 1], cache) for t in range(18)]
    close(torch.cat(parts, dim=1), expected)


def test_inputs_show_the_decay(mamba2_pair, close):
    _, graft, config = mamba2_pair()
    hidden = torch.randn(2, 9, config.hidden_size)
    inputs = graft.inputs(hidden)
    dt = torch.nn.functional.softplus(graft.in_proj(hidden)[..., -config.num_heads :] + graft.dt_bias)
    close(inputs.log_decay, -graft.A_log.exp() * dt)
    assert inputs.log_decay.shape == (2, 9, config.num_heads) and inputs.log_decay.dtype == torch.float32


def test_inputs_read_the_cache_without_writing(mamba2_pair, close):
    _, graft, config = mamba2_pair()
    hidden = torch.randn(1, 12, config.hidden_size)
    with torch.no_grad():
        whole = graft.inputs(hidden)
        cache = DynamicCache(config=config)
        graft(hidden[:, :7], cache)
        before = cache.layers[0].conv_states[0].clone()
        continued = graft.inputs(hidden[:, 7:], cache)
    close(continued.v, whole.v[:, 7:])
    assert torch.equal(cache.layers[0].conv_states[0], before)


def test_a_future_token_changes_nothing_before_it(mamba2_pair):
    _, graft, config = mamba2_pair()
    hidden = torch.randn(1, 40, config.hidden_size)
    other = hidden.clone()
    other[:, 23] += 1
    with torch.no_grad():
        first, second = graft(hidden), graft(other)
    assert torch.equal(first[:, :23], second[:, :23])
    assert (first[:, 23:] - second[:, 23:]).abs().max() > 1e-3


def test_casts_keep_the_decay_in_float32(mamba2_pair):
    _, graft, config = mamba2_pair()
    with torch.no_grad():
        graft.A_log.add_(1e-4)
    before = graft.A_log.clone()
    graft.bfloat16()
    assert graft.A_log.dtype == graft.dt_bias.dtype == graft.memory.dose.dtype == torch.float32
    assert torch.equal(graft.A_log, before)
    assert graft.in_proj.weight.dtype == torch.bfloat16
    out = graft(torch.randn(1, 9, config.hidden_size, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16


def test_the_cache_holds_no_graph(mamba2_pair):
    _, graft, config = mamba2_pair()
    cache = DynamicCache(config=config)
    graft(torch.randn(1, 9, config.hidden_size), cache)
    layer = cache.layers[0]
    assert not layer.conv_states[0].requires_grad and not layer.recurrent_states[0].requires_grad
    graft(torch.randn(1, 9, config.hidden_size), cache).sum().backward()
    assert graft.in_proj.weight.grad.abs().sum() > 0


def test_refuses_two_caches(mamba2_pair):
    _, graft, config = mamba2_pair()
    one, other = DynamicCache(config=config), DynamicCache(config=config)
    hidden = torch.randn(1, 2, config.hidden_size)
    graft(hidden, cache=one, cache_params=one)
    with pytest.raises(ValueError, match="names of one argument"):
        graft(hidden, cache=one, past_key_values=other)
    with pytest.raises(ValueError, match="DynamicLayer"):
        graft(hidden, cache=DynamicCache(config=PreTrainedConfig(num_hidden_layers=1)))
