"""The shell's environment does not change what a recipe says."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from surgery.adaptation.phases import Options
from surgery.adaptation.run import distill
from surgery.environment import in_force, processes, shielded
from surgery.errors import UsageError

HOSTILE = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
    "ACCELERATE_DYNAMO_BACKEND": "EAGER",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "ACCELERATE_TORCH_DEVICE": "meta",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_TP_SIZE": "2",
    "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
}


def weights(run):
    found = {}
    for shard in sorted((run / "phases" / "01-next-token" / "model").glob("*.safetensors")):
        found |= load_file(shard)
    assert found
    return found


def test_a_hostile_environment_gives_the_same_bits(make_base, make_recipe, phase, tmp_path, monkeypatch):
    recipe = make_recipe(make_base(), [phase("next-token", steps=3)])
    distill(recipe, tmp_path / "plain", options=Options(micro_batch=2), evaluate=False)
    for name, value in HOSTILE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("PYTORCH_API_KEY", "a secret")
    said = []
    distill(recipe, tmp_path / "hostile", options=Options(micro_batch=2, say=said.append), evaluate=False)
    one, other = weights(tmp_path / "plain"), weights(tmp_path / "hostile")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    (told,) = [line for line in said if "environment" in line]
    assert all(f"{name}={value}" in told for name, value in HOSTILE.items()) and "ignored" in told
    assert {name: os.environ[name] for name in HOSTILE} == HOSTILE  # as it was for the caller
    (entry,) = json.loads((tmp_path / "hostile" / "run.json").read_text())["in_force"]
    assert entry["ignored"] == sorted(HOSTILE)
    assert entry["environment"]["OMP_WAIT_POLICY"] == "passive" and "PYTORCH_API_KEY" not in entry["environment"]
    assert not set(entry["environment"]) & set(HOSTILE)
    assert (entry["device"], entry["dtype"], entry["autocast"], entry["world_size"]) == ("cpu", "float32", None, 1)
    assert entry["versions"]["torch"] == torch.__version__ and entry["since"].endswith("UTC")


def test_the_run_says_what_it_was_computed_with_each_time_that_changes(
    make_base, make_recipe, phase, tmp_path, monkeypatch
):
    base, run, said = make_base(), tmp_path / "run", []

    def call(count):
        recipe = make_recipe(base, [phase("next-token", steps=2, name=f"p{number}") for number in range(count)])
        distill(recipe, run, options=Options(say=said.append), evaluate=False)
        return json.loads((run / "run.json").read_text())["in_force"]

    assert len(call(1)) == 1 and len(call(2)) == 1 and not any("other means" in line for line in said)
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    assert [entry["environment"].get("MKL_CBWR") for entry in call(3)] == [None, "AVX2"]
    assert sum("other means: environment.MKL_CBWR: nothing before, AVX2 now" in line for line in said) == 1
    monkeypatch.delenv("MKL_CBWR")
    assert len(call(3)) == 2  # nothing was left to do


def test_float32_products_stay_float32(monkeypatch):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # as TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 does at import
    try:
        monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
        with shielded("cuda"):
            assert torch.get_float32_matmul_precision() == "highest"
            assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" not in os.environ
            assert in_force("cpu", 1, [])["float32_matmul_precision"] == "highest"
        assert torch.get_float32_matmul_precision() == "high" and os.environ["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"] == "1"
    finally:
        torch.set_float32_matmul_precision(before)


def test_what_cannot_be_overridden_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    words = r"NVIDIA_TF32_OVERRIDE=0 .*\n  .*unset NVIDIA_TF32_OVERRIDE"
    with pytest.raises(UsageError, match=words), shielded("cuda"):
        raise AssertionError("the block must not run")
    with shielded("cpu"):
        pass


def test_what_only_says_how_to_log_is_left(monkeypatch):
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "INFO")
    said = []
    with shielded("cpu", said.append) as ignored:
        assert os.environ["ACCELERATE_LOG_LEVEL"] == "INFO"
    assert not said and not ignored


TORCHRUN = {"LOCAL_RANK": "1", "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        (TORCHRUN, (3, 4)),
        ({"RANK": "3"}, (0, 1)),  # a scheduler's, of another sense
        ({"WORLD_SIZE": "1", "RANK": "0"}, (0, 1)),
        ({"WORLD_SIZE": "8", "RANK": "0"}, "WORLD_SIZE=8 is set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2 is set"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK is set in the environment, but RANK is not"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE=four in the environment is no number"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE=x in the environment is no number"),
    ],
)
def test_only_torchrun_makes_processes_share_the_work(environment, expected):
    if isinstance(expected, tuple):
        assert processes(environment) == expected
    else:
        with pytest.raises(UsageError, match=expected):
            processes(environment)
