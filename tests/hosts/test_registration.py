"""transformers knows the surgery_* model types, whichever is imported first, beside a folder named ``kernels``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Mamba2Config

from surgery import hosts
from surgery.models.configuration import SurgeryMamba2Config

AUTO = "from transformers import AutoConfig, AutoModelForCausalLM; "
ORDERS = {
    "surgery first": f"import surgery; {AUTO}",
    "transformers first": f"import transformers; {AUTO} import surgery; ",
    "a deep module between": f"import surgery, transformers.modeling_layers; {AUTO}",
}
LOAD = "assert AutoConfig.for_model('surgery_mamba2').surgery is None; "
LOAD += "print(type(AutoModelForCausalLM.from_pretrained({path!r})).__name__)"


@pytest.fixture(scope="session")
def upgraded(bases, tmp_path_factory):
    """A saved model with a swapped layer."""
    config = hosts.read_config(bases["gated_deltanet"])
    adapter = hosts.adapter_for(config)
    swap = {"schema": 1, "rule": "bayesian", "layers": [1], "options": {}, "base": "tiny"}
    directory = tmp_path_factory.mktemp("upgraded")
    adapter.build(adapter.surgery_config(config, swap)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("order", ORDERS)
def test_auto_classes_load_an_upgraded_model(upgraded, order):
    root = Path(__file__).parents[2]
    assert (root / "kernels" / "__init__.py").is_file()  # transformers looks for a package of this name
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ORDERS[order] + LOAD.format(path=str(upgraded))],
        cwd=root, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "SurgeryGatedDeltaNetForCausalLM"


def test_importing_surgery_imports_neither_torch_nor_transformers():
    code = "import surgery, sys; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_mamba2_keys_are_those_of_transformers():
    theirs = {name: field.default for name, field in Mamba2Config.__dataclass_fields__.items()}
    mine = {name: field.default for name, field in SurgeryMamba2Config.__dataclass_fields__.items()}
    assert mine.pop("surgery") is None
    assert {name: mine[name] for name in theirs} == theirs
