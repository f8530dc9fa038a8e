"""Tiny base checkpoints, written once a session; the battery's cases, from the ``case_*.py`` of this folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from surgery import hosts
from surgery.memory import RULES
from surgery.models.gated_deltanet import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "mamba2": Mamba2Config(
        num_heads=4, head_dim=16, expand=2, state_size=8, n_groups=1, chunk_size=16, **SIZES, **TOKENS
    ),
    "gated_deltanet": GatedDeltaNetConfig(
        num_heads=2, num_v_heads=4, head_dim=12, expand_v=1.5, intermediate_size=48, **SIZES, **TOKENS
    ),
}
CLASSES = {"mamba2": Mamba2ForCausalLM, "gated_deltanet": GatedDeltaNetForCausalLM}


def _module(name: str, file: str):
    """A file beside the tests as a module, under a name of its own: test files are imported without a package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


battery = _module("hosts_battery", "battery.py")
CASES = {
    case.name: case
    for path in sorted(Path(__file__).parent.glob("case_*.py"))
    for case in _module(f"hosts_{path.stem}", path.name).CASES
}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES.values(), ids=CASES.keys(), scope="session")


@pytest.fixture(scope="session")
def cases():
    """Case name -> case."""
    return CASES


@pytest.fixture(scope="session")
def base_of(tmp_path_factory):
    """Case -> the directory of its base with a tokenizer, written once; shared, so not to be changed."""
    written = {}

    def directory_of(case):
        if case.name not in written:
            written[case.name] = tmp_path_factory.mktemp("case")
            case.write(written[case.name])
            battery.write_tokenizer(written[case.name])
        return written[case.name]

    return directory_of


@pytest.fixture
def case_base(case, base_of):
    return base_of(case)


@pytest.fixture(scope="session", params=["mamba2", "gated_deltanet"])
def family(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    """Family -> directory of a base checkpoint, mamba2's written by transformers itself."""
    directories = {}
    for name, config in CONFIGS.items():
        model = CLASSES[name](config)
        battery.scatter(model)
        directories[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(directories[name])
    return directories


@pytest.fixture
def base(bases, family):
    return bases[family]


@pytest.fixture
def text():
    return torch.randint(3, 64, (2, 37))


@pytest.fixture
def model(base):
    return hosts.load_model(base)


@pytest.fixture
def swapped_in():
    """The ``surgery`` section of a configuration whose layers 0 and 2 hold ``rule``."""
    return lambda rule, **options: {"schema": 1, "rule": rule, "layers": [0, 2], "options": options, "base": "tiny"}


SWAPS = {**{rule: (rule, {}) for rule in sorted(RULES)}, "bayesian-token": ("bayesian", {"noise_from": "token"})}


@pytest.fixture(params=SWAPS.values(), ids=SWAPS)
def upgraded(request, base, swapped_in):
    """A model with two swapped layers at dose 1, started from a base checkpoint."""
    rule, options = request.param
    config = hosts.read_config(base)
    adapter = hosts.adapter_for(config)
    made = adapter.build(adapter.surgery_config(config, swapped_in(rule, **options))).eval()
    made.load_state_dict(hosts.load_model(base).state_dict(), strict=False)
    for layer in (0, 2):
        adapter.mixers(made)[layer].memory.reset_parameters("paper")
    return made
