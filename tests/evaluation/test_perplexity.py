"""Losses with the state carried on and in windows, against plain full forwards."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from surgery.data.texts import load_text
from surgery.data.tokens import Tokens, encode
from surgery.errors import JobError, UsageError
from surgery.evaluation.perplexity import (
    HEAD_TOKENS,
    Losses,
    bits_per_byte,
    by_position,
    difference,
    position_edges,
    stream_losses,
    window_losses,
)

TEXT = "the theory of the thing — in the other inn — was “the other” theory.\n" * 8


def random_tokens(count: int, vocab_size: int = 300) -> Tokens:
    return Tokens(torch.randint(vocab_size, (count,)), torch.arange(1, count + 1), "random")


def plain_losses(model, ids):
    with torch.no_grad():
        logits = model(ids).logits.float()
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


@pytest.mark.parametrize("segment", [1, 7, 64, 200, 201, 4096])
def test_stream_is_one_long_forward(make_model, segment):
    model = make_model()
    tokens = random_tokens(201 if segment > 1 else 40)
    expected = plain_losses(model, tokens.ids[None])[0]
    read = []
    losses = stream_losses(model, tokens, segment=segment, progress=read.append)
    torch.testing.assert_close(losses.nll, expected, rtol=1e-5, atol=1e-5)
    assert losses.position.tolist() == list(range(1, len(tokens)))
    assert sum(read) == len(tokens) - 1
    assert losses.perplexity == pytest.approx(math.exp(expected.double().mean().item()), rel=1e-5)


def test_windows_are_separate_forwards(make_model):
    model = make_model()
    tokens = random_tokens(205)
    losses = window_losses(model, tokens, 50, batch_tokens=150)
    expected = plain_losses(model, tokens.ids[:200].view(4, 50))
    torch.testing.assert_close(losses.nll.view(4, 49), expected, rtol=1e-5, atol=1e-5)
    assert losses.num_bytes == 4 * 49
    assert losses.window.unique().tolist() == [0, 1, 2, 3]


def test_bits_per_byte_arithmetic(make_model, tokenizer):
    """Nats over ln 2 over the bytes behind the first token, which nothing predicts."""
    model = make_model()
    tokens = encode(tokenizer, TEXT)
    total = plain_losses(model, tokens.ids[None]).double().sum().item()
    first = len(tokenizer.decode(tokens.ids[:1]).encode())
    expected = total / math.log(2) / (len(TEXT.encode()) - first)
    assert bits_per_byte(model, tokenizer, TEXT) == pytest.approx(expected, rel=1e-5)


def test_uniform_model_costs_log_of_the_vocabulary(make_model):
    model = make_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    tokens = random_tokens(100)
    losses = stream_losses(model, tokens)
    assert losses.perplexity == pytest.approx(300, rel=1e-5)
    assert losses.bits_per_byte == pytest.approx(math.log2(300), rel=1e-5)


def test_few_logits_exist_at_once(make_model):
    model = make_model()
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[:-1].numel()))
    tokens = random_tokens(3 * HEAD_TOKENS)
    stream_losses(model, tokens, segment=len(tokens))
    window_losses(model, tokens, 700, batch_tokens=10**6)
    assert max(rows) <= HEAD_TOKENS


def test_mode_and_gradients_are_left_alone(make_model):
    model = make_model().train()
    stream_losses(model, random_tokens(20))
    assert model.training
    model.eval()
    window_losses(model, random_tokens(20), 10)
    assert not model.training
    assert torch.is_grad_enabled()


def test_scaled_logits_are_the_models_own():
    """Where the configuration says that logits are more than the head's product, the model's own logits count."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(logits_scaling=4.0)
            self.base_model = torch.nn.Embedding(50, 16)
            self.head = torch.nn.Linear(16, 50, bias=False)

        def get_output_embeddings(self):
            return self.head

        def forward(self, input_ids, use_cache=None):
            return SimpleNamespace(logits=self.head(self.base_model(input_ids)) / self.config.logits_scaling)

    model = Scaled().eval()
    tokens = random_tokens(60, 50)
    losses = window_losses(model, tokens, 20)
    torch.testing.assert_close(losses.nll.view(3, 19), plain_losses(model, tokens.ids.view(3, 20)))
    with pytest.raises(UsageError, match="takes no cache"):
        stream_losses(model, tokens)


def test_losses_that_are_not_finite_fail(make_model):
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(JobError, match="not finite"):
        stream_losses(model, random_tokens(30))


def test_short_text_is_refused(make_model, tokenizer):
    with pytest.raises(UsageError, match="shorter than one context of 64"):
        window_losses(make_model(), encode(tokenizer, "short"), 64)
    with pytest.raises(UsageError, match="shorter than one context of 2"):
        stream_losses(make_model(), random_tokens(1))


@pytest.mark.parametrize("context", [2, 10, 16, 17, 24, 100, 1024, 2048, 3000, 4096])
def test_position_edges_cover_every_position_once(context):
    edges = position_edges(context)
    assert edges[0] == 1 and edges[-1] == context
    assert edges == sorted(set(edges))
    lengths = [stop - start for start, stop in pairwise(edges)]
    if len(lengths) > 1:
        assert lengths[-1] >= edges[-2] // 2
        assert all(stop == 2 * start for start, stop in pairwise(edges[1:-1]))


def test_bucket_edges_belong_to_the_bucket_that_starts_there():
    position = torch.arange(1, 33)
    losses = Losses(position.float(), position, torch.zeros(32, dtype=torch.int64), 32)
    buckets = by_position(losses, [1, 16, 32])
    assert [(bucket["from"], bucket["to"], bucket["tokens"]) for bucket in buckets] == [(1, 16, 15), (16, 32, 16)]
    assert buckets[0]["mean"] == pytest.approx(8.0)  # mean of 1..15
    assert buckets[1]["mean"] == pytest.approx(23.5)  # mean of 16..31


def test_difference_is_paired(make_model):
    """Pairing takes out what both models find hard: the interval is far narrower than either loss's spread."""
    tokens = random_tokens(600)
    losses = window_losses(make_model(), tokens, 60)
    nudge = 0.1 + 0.01 * torch.randn_like(losses.nll)
    worse = Losses(losses.nll + nudge, losses.position, losses.window, losses.num_bytes)
    interval = difference(worse, losses)
    # the sample's own mean: the true one lies outside one 95% interval in twenty
    assert interval.mean == pytest.approx(nudge.double().mean().item(), abs=1e-6)
    assert interval.low < interval.mean < interval.high
    assert interval.high - interval.low < 0.01 < losses.nll.std()
    same = difference(losses, losses)
    assert (same.mean, same.low, same.high) == (0.0, 0.0, 0.0)
    buckets = by_position(worse, position_edges(60), losses)
    assert all(abs(bucket["mean"] - 0.1) < 0.01 for bucket in buckets)


def test_different_tokens_cannot_be_paired(make_model):
    model = make_model()
    with pytest.raises(ValueError, match="same tokens"):
        difference(stream_losses(model, random_tokens(30)), stream_losses(model, random_tokens(31)))


def test_bundled_text_is_long_enough_to_measure_on(tokenizer):
    assert len(encode(tokenizer, load_text("bundled"))) > 16_384
