"""Horizons: what is measured is what the model's own tensors say."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from surgery.data.texts import load_text
from surgery.data.tokens import Tokens, encode
from surgery.errors import JobError, UsageError
from surgery.hosts import adapter_for, load_model, read_config
from surgery.inspection.gains import WRITES
from surgery.inspection.horizon import (
    CAP,
    PIECES,
    HorizonMeter,
    LayerHorizon,
    TextMeter,
    choices,
    horizon,
    measure_horizons,
    ranked,
    stability,
    static_horizons,
)
from surgery.inspection.measure import inspect_model, inspect_static, rank_layers


def random_tokens(count):
    return Tokens(torch.randint(256, (count,)), torch.arange(1, count + 1), "random")


def grafted(path):
    adapter = adapter_for(read_config(path))
    model = load_model(path, dtype=torch.float32)
    return adapter, model, adapter.mixers(model)


def test_horizon_of_known_decays():
    decay = torch.tensor([0.5, 0.9, 0.99, 0.999], dtype=torch.float64)
    torch.testing.assert_close(horizon(decay.log()), 1 / (1 - decay), rtol=1e-12, atol=0)
    # the digits that 1 - alpha would lose in float32
    assert horizon(torch.tensor(-1e-7)).item() == pytest.approx(1e7, rel=1e-5)
    assert horizon(torch.tensor([0.0, -1e-12, -math.inf, -30.0])).tolist() == pytest.approx([CAP, CAP, 1.0, 1.0])


def test_meter_against_all_values_at_once():
    log_decay = -torch.exp(2 * torch.randn(3000, 5) - 4)
    meter = HorizonMeter(5)
    for part in log_decay.split(700):
        meter.add(part)
    figures = meter.result(3)
    values = horizon(log_decay)
    assert figures.layer == 3 and figures.tokens == 3000
    assert figures.mean == pytest.approx(values.mean().item())
    assert figures.log_mean == pytest.approx(values.log().mean().exp().item())
    assert figures.alpha == pytest.approx(log_decay.double().exp().mean().item())
    assert figures.heads == pytest.approx(values.mean(0).tolist())
    assert figures.heads_log_mean == pytest.approx(values.log().mean(0).exp().tolist())
    for share, figure in ((0.1, figures.p10), (0.5, figures.median), (0.9, figures.p90)):
        assert figure == pytest.approx(values.flatten().quantile(share).item(), rel=0.005)


def test_capped_share_is_reported():
    meter = HorizonMeter(4)
    meter.add(torch.tensor([[0.0, -0.1, -0.1, -0.1], [-0.1, -0.1, -0.1, -0.1]]))
    figures = meter.result(0)
    assert figures.capped == pytest.approx(1 / 8)
    assert figures.heads[0] == pytest.approx((CAP + horizon(torch.tensor(-0.1)).item()) / 2)


@pytest.mark.parametrize("tokens", [3, 4, 997])
def test_pieces_of_a_text_and_the_whole(tokens):
    log_decay = -torch.exp(torch.randn(1, tokens, 5))
    meter, read = TextMeter(lambda: HorizonMeter(5), tokens), 0
    for part in log_decay.split(130, 1):  # pieces begin and end inside of what is read at once
        meter.add(part, read)
        read += part.shape[1]
    found = meter.result(2)
    whole = HorizonMeter(5)
    whole.add(log_decay)
    assert found.tokens == tokens
    for metric, figure in whole.result(2).figures.items():
        assert found.figure(metric) == pytest.approx(figure)
    bounds = [tokens * piece // PIECES for piece in range(PIECES + 1)]
    alone = []
    for first, end in itertools.pairwise(bounds):
        if end > first:
            alone.append(HorizonMeter(5))
            alone[-1].add(log_decay[:, first:end])
    assert len(found.pieces) == len(alone)
    for piece, one in zip(found.pieces, alone, strict=True):
        assert piece == pytest.approx(one.result(2).figures, rel=1e-12)


def test_how_stable_a_choice_is():
    def layer(number, mean, pieces):
        zeros = {"median": 0.0, "p10": 0.0, "p90": 0.0, "alpha": 0.0, "capped": 0.0}
        each = [{"mean": one, "log-mean": -one, "median": 0.0} for one in pieces]
        return LayerHorizon(number, mean, -mean, heads=[], heads_log_mean=[], tokens=8, pieces=each, **zeros)

    figures = [layer(0, 9.0, [9, 9, 1, 9]), layer(3, 5.0, [5, 5, 5, 5]), layer(7, 1.0, [1, 1, 9, 8])]
    assert stability(figures, "mean", 2) == {0: 3, 3: 3, 7: 2}
    assert stability(figures, "log-mean", 1) == {0: 1, 7: 3 - 1, 3: 1}
    assert choices(figures, 1) == {"mean": [0], "log-mean": [7], "median": [0]}
    assert stability([replace(one, pieces=None) for one in figures], "mean", 2) == {}


@pytest.mark.parametrize("segment", [50, 4096])
def test_mamba2_against_upstreams_own_tensors(make_checkpoint, segment):
    """transformers' model, with a hook on its input projection: alpha = exp(-exp(A_log) softplus(dt + dt_bias))."""
    from transformers import Mamba2ForCausalLM

    path = make_checkpoint("mamba2", n_groups=1)  # releases of transformers differ in the norm of several groups
    upstream = Mamba2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokens = random_tokens(130)
    expected = {}
    for layer, block in enumerate(upstream.backbone.layers):
        mixer = block.mixer

        def keep(module, args, output, layer=layer, mixer=mixer):
            dt = F.softplus(output[..., -mixer.num_heads :] + mixer.dt_bias).clamp(*mixer.time_step_limit)
            expected[layer] = (1 / (1 - torch.exp(-mixer.A_log.exp() * dt).double())).clamp(max=CAP)[0]

        mixer.in_proj.register_forward_hook(keep)
    with torch.no_grad():
        upstream(tokens.ids[None])
    _, model, mixers = grafted(path)
    read = []
    figures = measure_horizons(model, mixers, tokens, segment=segment, progress=read.append)
    assert sum(read) == 130
    assert [figure.layer for figure in figures] == sorted(expected)
    for figure in figures:
        assert figure.heads == pytest.approx(expected[figure.layer].mean(0).tolist(), rel=1e-3)
        assert figure.log_mean == pytest.approx(expected[figure.layer].log().mean().exp().item(), rel=1e-3)
        assert figure.rule == "host" and figure.diagnostics is None


def test_gated_deltanet_against_its_gate_projection(make_checkpoint):
    path = make_checkpoint("gated_deltanet")
    _, model, mixers = grafted(path)
    tokens = random_tokens(90)
    expected = {}
    handles = []
    for layer, mixer in mixers.items():

        def keep(module, args, output, layer=layer, mixer=mixer):
            expected[layer] = horizon(-mixer.A_log.exp() * F.softplus(output + mixer.dt_bias))[0]

        handles.append(mixer.a_proj.register_forward_hook(keep))
    with torch.no_grad():
        model(tokens.ids[None])
    for handle in handles:
        handle.remove()
    for figure in measure_horizons(model, mixers, tokens, segment=40):
        assert figure.heads == pytest.approx(expected[figure.layer].mean(0).tolist(), rel=1e-3)


def test_hooks_are_removed(make_checkpoint):
    _, model, mixers = grafted(make_checkpoint())
    measure_horizons(model, mixers, random_tokens(10))
    assert not any(mixer.memory._forward_hooks for mixer in mixers.values())


def test_decays_that_are_no_numbers_fail(make_checkpoint):
    def spoil(adapter, model):
        adapter.mixers(model)[2].dt_bias[1] = math.nan

    _, model, mixers = grafted(make_checkpoint(change=spoil))
    with pytest.raises(JobError, match="layer 2: a decay is not a number"):
        measure_horizons(model, mixers, random_tokens(10))
    assert not any(mixer.memory._forward_hooks for mixer in mixers.values())


@pytest.mark.parametrize("family", ["mamba2", "gated_deltanet"])
def test_static_estimate_reads_two_tensors_a_layer(make_checkpoint, family, monkeypatch):
    path = make_checkpoint(family)
    from surgery.checkpoint.reading import Checkpoint

    names = []
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: names.append(name) or read(self, name))
    inspection = inspect_static(path)
    assert {name.rpartition(".")[2] for name in names} == {"A_log", "dt_bias"}
    assert inspection.static and inspection.tokens is None
    assert inspection.as_dict("mean", 1)["estimate"] == "static"
    _, _, mixers = grafted(path)
    for figure in inspection.figures:
        mixer = mixers[figure.layer]
        expected = horizon(-mixer.A_log.exp() * F.softplus(mixer.dt_bias))
        assert figure.heads == pytest.approx(expected.tolist(), rel=1e-4)
        assert figure.tokens is None


def test_palimpsa_layers_show_their_importance_spread(make_checkpoint):
    """I0 + E from the cache after the same text, straight from the state."""

    def raise_dose(adapter, model):
        memory = adapter.mixers(model)[1].memory
        memory.dose.fill_(1.0)
        memory.b_scale.fill_(30.0)

    path = make_checkpoint("mamba2", {"rule": "palimpsa", "layers": [1]}, raise_dose)
    _, model, mixers = grafted(path)
    tokens = random_tokens(70)
    figures = {figure.layer: figure for figure in measure_horizons(model, mixers, tokens, segment=30)}
    with torch.no_grad():
        state = model(tokens.ids[None], use_cache=True).cache.layers[1].recurrent_states[0]
    importance = 1 + state[0, 1].flatten(1)  # Ip_log is 0
    spread = (importance.amax(1) - importance.amin(1)) / importance.amin(1)
    assert figures[1].diagnostics["importance_spread"] == pytest.approx(spread.tolist(), rel=1e-3)
    assert min(figures[1].diagnostics["importance_spread"]) > 0
    assert max(figures[1].diagnostics["importance_spread"]) > 0.01
    assert (figures[1].rule, figures[1].dose) == ("palimpsa", 1.0)
    assert figures[0].rule == "host" and figures[0].diagnostics is None


def test_bayesian_layers_show_the_predicted_covariances_condition(make_checkpoint):
    """Restoring noise with retention 1 and prior 1 predicts c P + (1 - c) I, here at the text's mean decay."""

    def raise_dose(adapter, model):
        adapter.mixers(model)[2].memory.dose.fill_(1.0)

    path = make_checkpoint("gated_deltanet", {"rule": "bayesian", "layers": [2]}, raise_dose)
    _, model, mixers = grafted(path)
    tokens = random_tokens(60)
    decays = []
    mixers[2].memory.register_forward_pre_hook(lambda module, args: decays.append(args[0].log_decay))
    with torch.no_grad():
        state = model(tokens.ids[None], use_cache=True).cache.layers[2].recurrent_states[0]
    figure = measure_horizons(model, mixers, tokens)[2]
    width = mixers[2].geometry.value_dim
    c = (2 * decays[0][0].mean(0)).exp()[:, None, None]
    predicted = c * state[0, :, :, width:] + (1 - c) * torch.eye(mixers[2].geometry.key_dim)
    values = torch.linalg.eigvalsh(predicted.double())
    expected = (values[:, -1] / values[:, 0]).tolist()
    assert figure.diagnostics["covariance_condition"] == pytest.approx(expected, rel=1e-3)
    assert max(expected) > 1.1


@pytest.mark.parametrize("dose", (0.0, 1.0))
def test_bayesian_layers_show_their_gain_along_the_text(make_checkpoint, dose):
    """The share of a read's error that each write of the last tokens takes off, from the layer itself: a write of zero
    values turns the read at its own key into 1 - gain of what the decayed memory gives there."""

    def raise_dose(adapter, model):
        adapter.mixers(model)[2].memory.dose.fill_(dose)

    path = make_checkpoint("gated_deltanet", {"rule": "bayesian", "layers": [2]}, raise_dose)
    _, model, mixers = grafted(path)
    tokens, caught = random_tokens(130), []
    figures = measure_horizons(model, mixers, tokens, segment=50)
    assert [figure.gains is None for figure in figures] == [True, True, False]
    figure = figures[2]
    assert figure.gains["tokens"] == [0, 50, 100, 130 - WRITES]
    memory = mixers[2].memory
    memory.register_forward_hook(lambda module, args, output: caught.append(args[0]))
    with torch.no_grad():
        model(tokens.ids[None])
        (given,) = caught
        _, state = memory(given.span(slice(0, 130 - WRITES)))
        gains = []
        for token in range(130 - WRITES, 130):
            one = given.span(slice(token, token + 1))
            one = replace(one, q=one.k, v=torch.zeros_like(one.v))
            kept, heads = state[..., : memory.geometry.value_dim], memory.geometry.num_heads
            key = one.k[:, 0].repeat_interleave(heads // one.k.shape[2], dim=1)
            before = (one.log_decay[:, 0].exp()[..., None, None] * kept * key[..., None]).sum(-2)
            after = memory(one, state)[0][:, 0]
            gains.append(1 - (after * before).sum(-1)[0] / before.square().sum(-1)[0])
    expected = torch.stack(gains).mean(0).tolist()
    assert figure.diagnostics["gain"] == pytest.approx(expected, rel=1e-3)
    assert figure.gains["gain"][-1] == pytest.approx(sum(expected) / len(expected), rel=1e-3)
    same = figure.diagnostics["host_gain"] == pytest.approx(figure.diagnostics["gain"], rel=1e-5)
    assert same == (dose == 0)


def test_a_text_of_a_few_tokens_has_gains_too(make_checkpoint):
    path = make_checkpoint("mamba2", {"rule": "bayesian", "layers": [1]}, lambda adapter, model: None)
    _, model, mixers = grafted(path)
    (figure,) = (one for one in measure_horizons(model, mixers, random_tokens(3)) if one.gains)
    assert figure.gains["tokens"] == [0] and figure.gains["host_gain"] == [0]


def test_ranking(make_checkpoint):
    def order(adapter, model):
        for layer, mixer in adapter.mixers(model).items():
            mixer.dt_bias.fill_([-2.0, -8.0, -2.0, -5.0][layer])
            mixer.A_log.zero_()
            mixer.in_proj.weight[-4:] = 0

    path = make_checkpoint(change=order)
    for metric in ("mean", "log-mean", "median"):
        assert [figure.layer for figure in rank_layers(path, metric, tokens=300)] == [1, 3, 0, 2]
    inspection = inspect_model(path, tokens=300)
    result = inspection.as_dict("mean", 2)
    assert result["ranking"] == [1, 3, 0, 2] and result["chosen"] == [1, 3]
    with pytest.raises(UsageError, match="choose one of mean, log-mean, median"):
        rank_layers(path, "average")


def test_metrics_may_disagree():
    """One head that never forgets lifts the mean; the median does not see it."""
    figures = static_horizons(
        {0: torch.tensor([-1e-6, -1.0, -1.0, -1.0]), 1: torch.tensor([-0.01, -0.01, -0.01, -0.01])}
    )
    assert [figure.layer for figure in ranked(figures, "mean")] == [0, 1]
    assert [figure.layer for figure in ranked(figures, "median")] == [1, 0]


def test_bundled_text_is_its_training_part(make_checkpoint):
    inspection = inspect_model(make_checkpoint(), tokens=300)
    assert "first 80%" in inspection.text and inspection.tokens == 300


def test_text_that_says_nothing_is_refused(make_checkpoint, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(UsageError, match=r"short\.txt: 11 tokens are shorter"):
        inspect_model(make_checkpoint(), str(short))


def test_tokenizer_larger_than_the_vocabulary_is_refused(make_checkpoint):
    with pytest.raises(UsageError, match="makes ids up to 255, but the model's vocabulary holds 100"):
        inspect_model(make_checkpoint(vocab_size=100), tokens=300)


def test_the_state_is_carried_on(make_checkpoint):
    """Hidden states depend on what came before, so decays measured in separate pieces would differ."""
    path = make_checkpoint("gated_deltanet")
    _, model, mixers = grafted(path)
    tokens = encode_bundled(path, 200)
    whole = measure_horizons(model, mixers, tokens, segment=200)
    carried = measure_horizons(model, mixers, tokens, segment=33)
    for one, other in zip(whole, carried, strict=True):
        assert one.heads == pytest.approx(other.heads, rel=1e-4)
    second = Tokens(tokens.ids[100:], tokens.ends[100:], "rest")
    alone = measure_horizons(model, mixers, second)
    assert alone[-1].heads != pytest.approx(whole[-1].heads, rel=1e-3)


def encode_bundled(path, count):
    from surgery.evaluation.loading import load_tokenizer

    return encode(load_tokenizer(path), load_text("bundled"), count)
