"""Which parameters are trained, at which rate, with which decay."""

from __future__ import annotations

import pytest

from surgery.adaptation.parameters import WEIGHT_DECAY, optimizer, parameter_groups, select
from surgery.errors import UsageError


def chosen(body, trainable, **options):
    return select(body.model, body.mixers, trainable, phase="p", **options)


def test_swapped_is_the_swapped_mixers(make_body):
    body, _ = make_body()
    selection = chosen(body, "swapped")
    prefixes = ("backbone.layers.0.mixer.", "backbone.layers.2.mixer.")
    everything = [name for name, _ in body.model.named_parameters() if name.startswith(prefixes)]
    assert list(selection.trained) == everything and not selection.shared
    assert selection.memory == {name for name in everything if ".memory." in name} and selection.memory
    assert all(p.requires_grad == (name in selection.trained) for name, p in body.model.named_parameters())


def test_swapped_memory_is_what_was_added(make_body):
    body, _ = make_body("gated_deltanet", "bayesian")
    selection = chosen(body, "swapped-memory")
    assert selection.trained and all(".memory." in name for name in selection.trained)
    assert selection.memory == selection.trained.keys()


def test_all_and_patterns_reach_shared_weights(make_body):
    body, _ = make_body()
    everything = chosen(body, "all")
    assert everything.trained.keys() == {name for name, _ in body.model.named_parameters()}
    assert "backbone.embeddings.weight" in everything.shared
    for _, parameter in body.model.named_parameters():
        parameter.requires_grad_(True)
    # a tied weight answers to both of its names
    tied = chosen(body, ["lm_head.*", "*.layers.2.mixer.memory.*"])
    assert tied.shared == {"backbone.embeddings.weight"}
    assert {name for name in tied.trained if name.startswith("backbone.layers")} == tied.memory


def test_a_control_has_no_added_parameters(make_body):
    control, _ = make_body(rule="host")
    swapped, _ = make_body(rule="palimpsa")
    one, other = chosen(control, "swapped"), chosen(swapped, "swapped")
    assert one.trained.keys() == other.trained.keys() - other.memory
    with pytest.raises(UsageError, match="leaves nothing to train"):
        chosen(make_body(rule="host")[0], "swapped-memory")


def test_what_a_rule_fixes_stays_fixed(make_body):
    body, _ = make_body()
    fixed = body.model.get_submodule(body.mixers[0] + ".memory").b_scale.requires_grad_(False)
    selection = chosen(body, "all")
    assert not fixed.requires_grad and "backbone.layers.0.mixer.memory.b_scale" not in selection.trained


def test_a_phase_at_dose_zero_leaves_the_added_parameters_out(make_body):
    assert not chosen(make_body()[0], "swapped", silent=True).memory
    with pytest.raises(UsageError, match="at dose 0 nothing that the graft added has a gradient"):
        chosen(make_body()[0], "swapped-memory", silent=True)


def test_a_pattern_that_matches_nothing_is_refused(make_body):
    with pytest.raises(UsageError, match=r"'\*\.mixr\.\*' matches no parameter"):
        chosen(make_body()[0], ["*.mixer.*", "*.mixr.*"])


def test_groups_take_their_rate_and_matrices_decay(make_body):
    selection = chosen(make_body()[0], "swapped")
    groups = parameter_groups(selection, 1e-2, 1e-4)
    assert sum(len(group["params"]) for group in groups) == len(selection.trained)
    names = {id(parameter): name for name, parameter in selection.trained.items()}
    for group in groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            assert group["lr"] == (1e-2 if name in selection.memory else 1e-4)
            assert group["weight_decay"] == (WEIGHT_DECAY if parameter.ndim >= 2 else 0.0)
    assert optimizer(selection, 1e-2, 1e-4).defaults["betas"] == (0.9, 0.95)
