"""The preflight knows from names and shapes what a phase would train of each host, and what it could not write."""

from __future__ import annotations

import functools

import pytest
from hosts_battery import write_recipe

from surgery.adaptation import saving
from surgery.adaptation.phases import choose, dose_schedule
from surgery.adaptation.teaching import body_of
from surgery.errors import UserError
from surgery.hosts import adapter_for, load_model, open_model
from surgery.operation import apply
from surgery.preflight import Job, preflight
from surgery.recipe import load_recipe

TRAINABLE = ["swapped", "swapped-memory", "all", ["*memory*"], ["*nomatch*"], ["*norm*", "*embed*"]]


def refused(check) -> bool:
    try:
        check()
    except UserError:
        return True
    return False


@pytest.mark.parametrize("name", ["mamba2-plain", "qwen3_5-multimodal", "olmo_hybrid-plain", "kimi_linear-plain"])
def test_names_on_the_disk(name, cases, base_of, tmp_path):
    compare(cases[name], base_of(cases[name]), tmp_path)


@pytest.mark.slow
def test_every_host(case, case_base, tmp_path):
    compare(case, case_base, tmp_path)


def compare(case, base, folder):
    """The preflight refuses the phases that the loaded model would refuse, and no other."""
    phases = [
        {"name": f"p{number}", "kind": "next-token", "steps": 1, "context": 8, "batch": 8, "trainable": one}
        for number, one in enumerate(TRAINABLE)
    ]
    path = write_recipe(folder, base, case.swapped, data="bundled", phases=phases)
    recipe = load_recipe(path)
    with pytest.raises(UserError) as told:
        preflight(recipe, Job(drift=False, evaluates=False))
    apply(recipe, folder / "out", drift="skip")
    source = open_model(folder / "out")
    model = load_model(source.directory)
    body = body_of(model, source.config, list(case.swapped))
    stored = functools.partial(adapter_for(source.config).disk_tensors, source.config, model)
    fresh = [parameter for parameter in model.parameters() if parameter.requires_grad]
    memories = {layer: model.get_submodule(f"{mixer}.memory") for layer, mixer in body.mixers.items()}
    dose = 0.0
    for index in range(len(phases)):
        schedule = dose_schedule(recipe, index, dose)
        dose = schedule.stop

        def trained(index=index, schedule=schedule):
            selection = choose(recipe, index, body, schedule)
            saving.require_places(source, saving.trained_tensors(selection, memories, body.mixers, stored))

        assert refused(trained) == (f"phases[{index}].trainable" in str(told.value)), (case.name, index, told.value)
        for parameter in fresh:
            parameter.requires_grad_(True)
