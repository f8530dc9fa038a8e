"""Models at given addresses: their sequences, what they write and read, and the two experiments made of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from surgery.adaptation.losses import IGNORED
from surgery.experiments.addressed import AddressedModel, Sequences, probabilities
from surgery.experiments.crowding import QUICK as CROWDING_QUICK
from surgery.experiments.crowding import Crowd, Crowding
from surgery.experiments.device_loop import DeviceLoop
from surgery.experiments.jobs import ended
from surgery.experiments.learned_collision import QUICK as COLLISION_QUICK
from surgery.experiments.learned_collision import Flood, LearnedCollision, _figures
from surgery.experiments.trained import Job

COLLISION = {
    "pairs": 3, "dim": 5, "width": 8, "steps": 3, "batch": 4, "floods": (0, 4), "overlaps": (0.9,), "tested": 6
}  # fmt: skip
CROWD = {"dim": 4, "values": 5, "width": 8, "steps": 3, "batch": 4, "trained": 2, "occupancies": (3,), "tested": 6}


def test_a_flood_writes_every_pair_once_and_then_a_alone():
    task = Flood(4, 6, (1, 5), (0.6, 0.8))
    drawn = Sequences(*task.draw(200, torch.Generator().manual_seed(0)))
    floods, overlaps = [], []
    for at, told, written, targets in zip(*drawn.tensors(), strict=True):
        keys, values = at[-4:], targets[-4:]
        assert not written[-4:].any() and (told[-4:] == 4).all() and (targets[:-4] == IGNORED).all()
        assert sorted(values.tolist()) == [0, 1, 2, 3]
        product = keys @ keys.T
        overlaps.append(product[0, 1].item())
        product[0, 1] = product[1, 0] = 0
        torch.testing.assert_close(product, torch.eye(4))
        writes = [int((keys @ key).argmax()) for key in at[written]]
        assert sorted(writes[:4]) == [0, 1, 2, 3] and set(writes[4:]) == {0}
        assert told[written].tolist() == [values[index] for index in writes]
        floods.append(len(writes) - 4)
        padding = ~written[:-4]
        assert not at[:-4][padding].any() and (told[:-4][padding] == 4).all()
        assert not padding[len(padding) - len(writes) :].any()
    assert set(floods) == {1, 2, 3, 4, 5} and 0.6 <= min(overlaps) < 0.62 and 0.78 < max(overlaps) <= 0.8


def test_a_flood_of_fixed_size_and_overlap():
    at, _, written, _ = Flood(3, 3, (4, 4), (0.95, 0.95)).draw(5, torch.Generator().manual_seed(1))
    assert written.sum(1).tolist() == [7] * 5
    torch.testing.assert_close((at[:, -3] * at[:, -2]).sum(-1), torch.full((5,), 0.95))


def test_a_crowd_writes_random_unit_keys_and_asks_for_each():
    task = Crowd(12, 3, 5)
    at, told, written, targets = task.draw(40, torch.Generator().manual_seed(0))
    assert at.shape == (40, 24, 3) and task.answers == 12
    torch.testing.assert_close(at.norm(dim=-1), torch.ones(40, 24))
    assert at[:, :12].equal(at[:, 12:]) and told[:, :12].equal(targets[:, 12:])
    assert written[:, :12].all() and not written[:, 12:].any()
    assert (told[:, 12:] == 5).all() and (targets[:, :12] == IGNORED).all()
    assert set(told[:, :12].flatten().tolist()) == {*range(5)}


@pytest.mark.parametrize("rule", LearnedCollision.labels)
def test_queries_and_padding_leave_the_memory_as_it_is(rule):
    model = AddressedModel(rule, width=8, dim=5, values=3, seed=0)
    at, told, written, targets = Flood(3, 5, (2, 2), (0.5, 0.5)).draw(4, torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model.logits(at, told, written)
        queries = [torch.cat((x[:, :5], x[:, 7:8]), dim=1) for x in (at, told, written)]  # the last query alone
        torch.testing.assert_close(model.logits(*queries)[:, -1], whole[:, -1])
        padding = (torch.zeros(4, 2, 5), torch.full((4, 2), 3), torch.zeros(4, 2, dtype=torch.bool))
        padded = [torch.cat(pair, dim=1) for pair in zip(padding, (at, told, written), strict=True)]
        torch.testing.assert_close(model.logits(*padded)[:, 2:], whole)
        # and what is written before a query is what it reads
        other = told.clone()
        other[:, 0] = (other[:, 0] + 1) % 3
        assert (model.logits(at, other, written)[:, -3:] - whole[:, -3:]).abs().max() > 1e-5
    loss = model(at, told, written, targets, count=torch.tensor(12))["loss"]
    expected = F.cross_entropy(whole[:, -3:].flatten(0, 1), targets[:, -3:].flatten())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        probabilities(model, Sequences(at, told, written, targets)), whole[:, -3:].log_softmax(-1)
    )


def test_the_reset_rule_is_the_bayesian_one_without_its_covariances_history():
    """Orthogonal keys tell the two apart by their gain alone, which the norm after the memory takes away; near ones by
    the direction of the write."""
    models = [AddressedModel(rule, width=8, dim=5, values=3, seed=4) for rule in ("bayesian", "reset")]
    with torch.no_grad():
        for layer in models[0].layers:  # forgetting would tell the two apart by itself
            layer.decay.fill_(-30.0)
        models[1].load_state_dict(models[0].state_dict(), strict=False)
        drawn = [Flood(3, 5, (2, 2), (o, o)).draw(4, torch.Generator().manual_seed(0))[:3] for o in (0.0, 0.9)]
        alike, apart = ((models[0].logits(*x) - models[1].logits(*x)).abs().max().item() for x in drawn)
    assert [layer.memory.retention for layer in models[1].layers] == [0.0, 0.0]
    assert alike < 1e-4 and apart > 1e-2


class Certain(torch.nn.Module):
    """A model that is sure of A's value wherever it is asked."""

    def logits(self, addresses, tokens, written):
        answers = torch.full((*tokens.shape, 3), -50.0)
        a = torch.where(written, tokens, -1)[:, -4]  # the last write, which is A's
        return answers.scatter(2, a[:, None, None].expand(-1, tokens.shape[1], 1), 50.0)


def test_accuracy_and_margin_are_of_b_against_a():
    right, margin, every = _figures(Certain(), Flood(3, 3, (2, 2), (0.9, 0.9)), 0, 50, "cpu")
    assert right == 0 and margin == pytest.approx(-1) and every == pytest.approx(1 / 3)


@pytest.mark.parametrize(("experiment", "settings"), ((LearnedCollision, COLLISION), (Crowding, CROWD)))
@pytest.mark.parametrize("rule", LearnedCollision.labels)
def test_a_training_moves_every_parameter_and_measures(experiment, settings, rule, monkeypatch):
    trained, run = experiment(**settings, rates=(1e-2,)), DeviceLoop.run
    loops = []
    monkeypatch.setattr(DeviceLoop, "run", lambda self, *rest: loops.append(self) or run(self, *rest))
    result = ended(trained.training(Job(rule, 1e-2, 0), "cpu"))
    values = {LearnedCollision: 3, Crowding: 5}[experiment]
    before = AddressedModel(rule, width=8, dim=trained.dim, values=values, seed=0).state_dict()
    after = loops[0].distiller.state_dict()
    still = {name for name, tensor in before.items() if tensor.equal(after[name]) and not name.endswith("dose")}
    assert all(name.endswith("log_p0") for name in still), still  # its gradient may be within rounding of 0
    if experiment is LearnedCollision:
        assert result["accuracy"].keys() == result["margin"].keys() == {
            f"{flood} at {overlap}" for flood in (0, 4, 8) for overlap in (0.8, 0.9)
        }
        assert all(-1 <= margin <= 1 for margin in result["margin"].values()) and 0 <= result["validation"] <= 1
    else:
        assert result["cross_entropy"].keys() == {"2", "3"} and result["validation"] < 0


@pytest.mark.parametrize(("experiment", "settings"), ((LearnedCollision, COLLISION), (Crowding, CROWD)))
def test_a_model_that_is_not_finite_has_answered_nothing(experiment, settings, monkeypatch):
    loss = DeviceLoop._loss
    monkeypatch.setattr(DeviceLoop, "_loss", lambda self, *rest: loss(self, *rest) * math.nan)
    result = ended(experiment(**settings, rates=(1e-2,)).training(Job("delta", 1e-2, 0), "cpu"))
    assert result["not_finite"] == 0
    if experiment is Crowding:
        assert set(result["cross_entropy"].values()) == {math.log(5)}
    else:
        assert set(result["accuracy"].values()) == {0.0}


def test_the_defaults_are_the_papers():
    collision, crowd = LearnedCollision(), Crowding()
    assert (collision.pairs, collision.dim, collision.width, collision.steps) == (8, 16, 64, 2500)
    assert collision.trained_flood == 8 and collision.trained_overlaps == (0.6, 0.8)
    assert max(collision.floods) == 256 and max(collision.overlaps) == 0.95 and len(collision.seeds) == 3
    assert crowd.dim == 16 and crowd.occupancies == (6, 8, 12, 16) and crowd.steps == 2500 and len(crowd.seeds) == 3


def test_quick_names_its_sizes():
    assert "200 steps of 32 sequences" in LearnedCollision(**COLLISION_QUICK).sizes()
    assert "8 dimensions" in Crowding(**CROWDING_QUICK).sizes()
