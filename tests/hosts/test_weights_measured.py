"""A model whose weights accelerate keeps elsewhere is measured as the one in memory."""

from __future__ import annotations

from dataclasses import asdict

import accelerate
import pytest
import torch

from surgery import hosts
from surgery.data.tokens import Tokens
from surgery.evaluation.perplexity import stream_losses, window_losses
from surgery.inspection.horizon import measure_horizons
from surgery.memory.modules import device_of


@pytest.fixture
def tokens():
    return Tokens(torch.randint(3, 64, (90,)), torch.arange(1, 91), "random")


def figures(model, mixers, tokens):
    return [
        stream_losses(model, tokens, segment=31).nll,
        window_losses(model, tokens, 30).nll,
        [asdict(one) for one in measure_horizons(model, mixers, tokens, segment=40)],
    ]


@pytest.mark.parametrize("buffers", [False, True])
def test_figures_of_offloaded_weights(upgraded, tokens, buffers):
    mixers = hosts.adapter_for(upgraded.config.to_dict()).mixers(upgraded)
    *losses, horizons = figures(upgraded, mixers, tokens)
    assert {one["dose"] for one in horizons} >= {1.0} or mixers[0].memory.rule == "host"
    accelerate.cpu_offload(upgraded, torch.device("cpu"), offload_buffers=buffers)
    assert device_of(upgraded) == torch.device("cpu")
    *found, found_horizons = figures(upgraded, mixers, tokens)
    assert all(parameter.is_meta for parameter in upgraded.parameters())
    assert found_horizons == horizons
    assert all(torch.equal(one, other) for one, other in zip(found, losses, strict=True))
