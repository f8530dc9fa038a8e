"""Training a base: the stream's forward pass, the optimiser, resuming, the watchdog."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from surgery.errors import JobError, UsageError
from surgery.pretraining import loop as training
from surgery.pretraining.bases import BASES, HORIZONS, base_config, create, initialise
from surgery.pretraining.optimisation import Muon, optimisers, orthogonalise, rate
from surgery.pretraining.stream import StreamModel
from surgery.pretraining.train import Settings, train

TINY = {
    "tiny-mamba2": {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 8},
    "tiny-gdn": {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "num_v_heads": 2, "head_dim": 8,
                 "intermediate_size": 24},
}


def tiny_config(base):
    return {**base_config(base), **TINY[base], "vocab_size": 64}


def tiny_model(base, seed=0):
    model = create(tiny_config(base))
    initialise(model, (4, 40), seed)
    return model


def text(tokens, seed=0):
    """A predictable stream: a noisy cycle."""
    rng = np.random.default_rng(seed)
    cycle = rng.permutation(60)[:16] + 1
    return np.where(rng.random(tokens) < 0.05, rng.integers(1, 64, tokens), np.resize(cycle, tokens)).astype(np.uint16)


SETTINGS = Settings(tokens=6 * 4 * 32, context=32, batch=4, log_every=2, restart=0.3)


@pytest.mark.parametrize("base", BASES)
def test_windows_with_carried_memory_are_one_long_text(base):
    model = tiny_model(base)
    runner = StreamModel(model, compiled=False, autocast=False)
    ids = torch.randint(1, 64, (2, 97))
    with torch.no_grad():
        whole = model(ids[:, :-1], labels=None, use_cache=False).logits
        expected = torch.nn.functional.cross_entropy(whole.flatten(0, 1), ids[:, 1:].flatten()).item()
        carries, losses = runner.start(2), []
        for at in range(0, 96, 48):
            loss, carries = runner.loss(ids[:, at : at + 48], ids[:, at + 1 : at + 49], carries)
            losses.append(loss.item())
        assert sum(losses) / 2 == pytest.approx(expected, rel=1e-5)

        # a row that starts anew reads its second window as if nothing had been before
        fresh, _ = runner.hidden(ids[:, 48:96], runner.start(2))
        kept, _ = runner.hidden(ids[:, 48:96], carries)
        mixed, _ = runner.hidden(ids[:, 48:96], [carry.detached(torch.tensor([True, False])) for carry in carries])
        assert torch.equal(mixed[1], fresh[1]) and torch.equal(mixed[0], kept[0])
        assert not torch.allclose(fresh[0], kept[0], atol=1e-3)


@pytest.mark.parametrize("base", BASES)
def test_every_parameter_learns_and_the_loss_falls(base):
    stream = text(4 * 32 * 60)
    settings = Settings(tokens=10**6, context=32, batch=4, log_every=10, muon_lr=0.05, adam_lr=0.02)
    model, report = train(base, stream, settings, "cpu", config=tiny_config(base), horizons=(4, 40))
    assert report["history"][-1]["loss"] < 0.6 * report["history"][0]["loss"]
    start = dict(tiny_model(base, settings.seed).named_parameters())
    unmoved = [name for name, parameter in model.named_parameters() if torch.equal(parameter, start[name])]
    assert unmoved == []


def test_an_interrupted_training_resumes_to_the_same_weights(tmp_path, monkeypatch):
    def run(checkpoint):
        return train("tiny-gdn", text(2000), SETTINGS, "cpu", config=tiny_config("tiny-gdn"), horizons=(4, 40),
                     checkpoint=checkpoint, checkpoint_every=3)[0]

    expected = run(None).state_dict()
    checkpoint = tmp_path / "state.pt"
    with monkeypatch.context() as patch:
        calls = []

        def stop(*_):
            calls.append(1)
            if len(calls) == 3:  # after steps 1, 2 and 4
                raise KeyboardInterrupt

        patch.setattr(StreamModel, "check_finite", stop)
        with pytest.raises(KeyboardInterrupt):
            run(checkpoint)
    seen = []
    monkeypatch.setattr(training, "say", seen.append)
    resumed = run(checkpoint).state_dict()
    assert "continues at step 3" in seen[0]
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


def test_the_watchdog_names_step_and_layer(monkeypatch):
    def broken(model, horizons, seed):
        initialise(model, horizons, seed)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")

    monkeypatch.setattr(training, "initialise", broken)
    with pytest.raises(JobError, match=r"step 0.*layers\.1\.mlp\.up_proj.*layer 1 is the first whose"):
        train("tiny-gdn", text(2000), SETTINGS, "cpu", config=tiny_config("tiny-gdn"), horizons=(4, 40))


def test_the_watchdog_names_the_memory_that_overflowed(monkeypatch):
    losses = StreamModel.losses

    def poisoned(self, tokens, targets, carries, reset=None):
        steps.append(1)
        if len(steps) == 4:
            carries[1].state[0] = float("inf")
        return losses(self, tokens, targets, carries, reset)

    steps = []
    monkeypatch.setattr(StreamModel, "losses", poisoned)
    settings = Settings(**{**vars(SETTINGS), "restart": 0.0, "log_every": 100})
    with pytest.raises(JobError, match=r"step 3: .*the memory of layer 1 is the first"):
        train("tiny-mamba2", text(2000), settings, "cpu", config=tiny_config("tiny-mamba2"), horizons=(4, 40))


def test_a_stream_shorter_than_a_step_is_refused():
    with pytest.raises(UsageError, match="no full step"):
        train("tiny-gdn", text(100), SETTINGS, "cpu", config=tiny_config("tiny-gdn"), horizons=(4, 40))


@pytest.mark.parametrize("shape", [(3, 24, 10), (2, 10, 24), (1, 16, 16)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape):
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    # a random square matrix has one near 0 now and then, which five steps do not bring up to 1
    matrices = left * (0.05 + torch.rand(values.shape))[..., None, :] @ right
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.3 and values.max() < 1.3


def test_muon_is_torch_muon_on_stacked_matrices():
    start = [torch.randn(12, 20), torch.randn(12, 20), torch.randn(30, 8)]
    mine = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    ours = Muon([(parameter, [parameter.shape[0]]) for parameter in mine], lr=0.1, weight_decay=0.2)
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        ours.step()
        reference.step()
    for a, b, first in zip(mine, theirs, start, strict=True):
        # torch's iteration runs in bf16, five steps of it
        assert (a - b).norm() < 2e-2 * (b - first).norm()


def test_parts_of_a_fused_projection_are_separate_matrices():
    weight = torch.randn(20, 6)
    fused, upper, lower = (torch.nn.Parameter(part.clone()) for part in (weight, weight[:12], weight[12:]))
    one = Muon([(fused, [12, 8])], lr=0.1, weight_decay=0.0)
    two = Muon([(upper, [12]), (lower, [8])], lr=0.1, weight_decay=0.0)
    fused.grad = torch.randn_like(weight)
    upper.grad, lower.grad = fused.grad[:12].clone(), fused.grad[12:].clone()
    one.step()
    two.step()
    assert torch.allclose(fused, torch.cat([upper, lower]), atol=1e-6)


@pytest.mark.parametrize("base", BASES)
def test_each_parameter_has_one_optimiser(base):
    model = tiny_model(base)
    held = [parameter for found in optimisers(model, 0.1, 0.1, 0.1) for group in found.param_groups
            for parameter in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))


def test_the_rate_rises_stays_and_falls_to_zero():
    rates = [rate(step, 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(0.05) and rates[300] == 1.0 and rates[-1] == pytest.approx(1 / 600)
    assert rates[400:] == sorted(rates[400:], reverse=True)


@pytest.mark.parametrize("base", BASES)
def test_layers_start_at_their_horizons(base):
    model = create(base_config(base))
    initialise(model, HORIZONS[base], 0)
    parameters = dict(model.named_parameters())
    centres = []
    for name in parameters:
        if name.endswith("A_log"):
            dt = torch.nn.functional.softplus(parameters[name.replace("A_log", "dt_bias")])
            centres.append((-(parameters[name].exp() * dt).log()).mean().exp().item())
    assert centres == pytest.approx(HORIZONS[base], rel=0.05)
