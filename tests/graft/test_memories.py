"""Every memory inside both grafts: in pieces, padded and packed it computes what it computes on whole, single texts."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, Mamba2Config

from surgery.memory import RULES


@pytest.fixture(params=sorted(RULES))
def rule(request):
    return request.param


@pytest.fixture(params=["mamba2", "gated_delta"])
def graft(request, rule, mamba2_pair, delta_graft):
    made = mamba2_pair(rule=rule)[1] if request.param == "mamba2" else delta_graft(key_heads=2, rule=rule)
    made.memory.reset_parameters("paper")
    assert made.memory.dose == 1
    return made


@pytest.fixture
def cache():
    config = Mamba2Config(num_heads=4, head_dim=16, hidden_size=32, num_hidden_layers=1)
    return lambda: DynamicCache(config=config)


def test_tokens_and_pieces(graft, cache, close):
    hidden = torch.randn(2, 24, 32)
    store = cache()
    with torch.no_grad():
        expected = graft(hidden)
        parts = [graft(hidden[:, :9], store)]
        parts += [graft(hidden[:, t : t + 1], store) for t in range(9, 15)]
        parts += [graft(hidden[:, 15:], store)]
    close(torch.cat(parts, dim=1), expected)
    state = store.layers[0].recurrent_states[0]
    assert state.dtype == torch.float32 and state.shape == graft.memory.state_shape(2)


def test_padding(graft, cache, close):
    text = torch.randn(1, 20, 32)
    padded = torch.cat([torch.randn(1, 7, 32), text], dim=1)
    mask = torch.cat([torch.zeros(1, 7), torch.ones(1, 20)], dim=1)
    one, other = cache(), cache()
    with torch.no_grad():
        close(graft(padded, one, mask)[:, 7:], graft(text, other))
    close(one.layers[0].recurrent_states[0], other.layers[0].recurrent_states[0])


def test_packing(graft, close):
    lengths = (6, 2, 13)
    hidden = torch.randn(1, sum(lengths), 32)
    reset = torch.zeros(1, sum(lengths), dtype=torch.bool)
    reset[0, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    with torch.no_grad():
        expected = torch.cat([graft(document) for document in hidden.split(lengths, dim=1)], dim=1)
        close(graft(hidden, reset=reset), expected)


def test_a_cleared_cache_starts_at_the_initial_state(graft, cache, close):
    hidden = torch.randn(1, 8, 32)
    store = cache()
    with torch.no_grad():
        graft(torch.randn(1, 5, 32), store)
        store.reset()
        close(graft(hidden, store), graft(hidden), 1e-7)


def test_beams_take_their_state_along(graft, cache, close):
    hidden = torch.randn(3, 10, 32)
    order = torch.tensor([2, 0, 0])
    store = cache()
    with torch.no_grad():
        graft(hidden[:, :6], store)
        store.reorder_cache(order)
        close(graft(hidden[order, 6:], store), graft(hidden[order])[:, 6:])


def test_gradients_reach_everything(graft):
    graft(torch.randn(2, 12, 32)).square().sum().backward()
    idle = [name for name, parameter in graft.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert idle == []
