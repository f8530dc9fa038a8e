"""The code beside an exported checkpoint: the package's own modules, and enough for torch and transformers alone."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from surgery.export import standalone
from surgery.export.run import export
from surgery.models.registry import MODELS
from surgery.models.stand_ins import HYBRIDS

TYPES = (*HYBRIDS, "surgery_mamba2", "surgery_gated_deltanet", "surgery_fla_mamba2", "surgery_mamba_ssm")

# directory, result, text ids: logits of each row alone, generation of each row alone, and of all rows padded left
LOADED = """
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
def measure(directory, result, **options):
    model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # aligned in memory, whichever process reads the file
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.padding_side, tokenizer.pad_token_id = "left", 7
    texts = ["a longer text than the other one", "some words"]
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False, "pad_token_id": 7}
    tensors = {}
    with torch.no_grad():
        for row, text in enumerate(texts):
            alone = tokenizer(text, return_tensors="pt")
            tensors[f"logits {row}"] = model(alone["input_ids"]).logits
            tensors[f"generated {row}"] = model.generate(**alone, **options)[0, -10:].contiguous()
        together = tokenizer(texts, return_tensors="pt", padding=True)
        tensors["together"] = model.generate(**together, **options)[:, -10:].contiguous()
        tensors["padded"] = model(**together).logits
    save_file(tensors, result)
    return model
"""
BARE = (
    LOADED
    + """
model = measure(sys.argv[1], sys.argv[2], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
"""
)


def here(directory, result):
    """The same with the package's classes, in this process."""
    scope: dict = {}
    exec(LOADED, scope)
    model = scope["measure"](directory, result)
    assert type(model).__module__.startswith("surgery.models.")
    return load_file(result)


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    for row in (0, 1):
        assert torch.equal(theirs["together"][row], theirs[f"generated {row}"])


@pytest.mark.parametrize("model_type", TYPES)
def test_every_family_has_its_code(model_type):
    files = standalone.code_of(model_type)
    module, config, model = standalone.classes_of(model_type)
    assert standalone.auto_map(model_type) == {
        "AutoConfig": f"{standalone.flat_name(module)}.{config}",
        "AutoModelForCausalLM": f"{standalone.flat_name(module)}.{model}",
    }
    foreign = set()
    for name, text in files.items():
        source = re.search(r"^# (surgery[\w.]*) of model-surgery", text, re.M)[1]
        digest = hashlib.sha256(standalone.source_of(source).encode()).hexdigest()
        assert "Apache-2.0" in text.splitlines()[0] and f"# SHA-256 of the module it was made from: {digest}\n" in text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                foreign |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                foreign.add(node.module.partition(".")[0])
            elif isinstance(node, ast.ImportFrom):
                needed = [node.module] if node.module else [alias.name for alias in node.names]
                assert node.level == 1 and all(f"{one}.py" in files for one in needed), (name, needed)
    assert foreign <= {*sys.stdlib_module_names, "torch", "transformers", "triton"}


def test_every_type_is_among_those_tried():
    assert len(TYPES) == len(MODELS) + len(HYBRIDS)


def test_transformers_finds_every_file(tmp_path):
    """By its own search through the lines of the files, from the one that auto_map names."""
    from transformers.dynamic_module_utils import get_imports, get_relative_import_files

    for model_type in ("surgery_mamba2", "surgery_qwen3_next"):
        directory = tmp_path / model_type
        directory.mkdir()
        files = standalone.code_of(model_type)
        for name, text in files.items():
            (directory / name).write_text(text)
        entry = standalone.auto_map(model_type)["AutoConfig"].partition(".")[0]
        found = {path.rpartition("/")[2] for path in get_relative_import_files(directory / f"{entry}.py")}
        assert found | {f"{entry}.py"} == files.keys()
        # what transformers refuses to load without: Triton is not among it
        needed = {package for name in files for package in get_imports(directory / name)}
        assert needed <= {*sys.stdlib_module_names, "torch", "transformers"}


def test_a_tool_or_an_unknown_form_is_refused(monkeypatch):
    source_of = standalone.source_of

    def with_line(line):
        standalone._rewritten.cache_clear()

        def changed(name):
            return source_of(name) + (f"\n{line}\n" if name == "surgery.kernels.chunks" else "")

        monkeypatch.setattr(standalone, "source_of", changed)
        return standalone.code_of("surgery_mamba2")

    with pytest.raises(ValueError, match=r"surgery\.recipe\.sizes: is a tool"):
        with_line("from surgery.recipe.sizes import format_bytes")
    with pytest.raises(ValueError, match=r"surgery\.kernels\.chunks, line \d+: write `from surgery.errors import"):
        with_line("import surgery.errors")
    with pytest.raises(ValueError, match="line of its own"):
        with_line("x = 1; from surgery.errors import UserError")
    standalone._rewritten.cache_clear()


def test_loads_with_torch_and_transformers_alone(make_run, quick, bare, tmp_path):
    output = tmp_path / "out-1.5 b"  # a name that is no name of a Python package
    export(str(make_run("gated_deltanet", "bayesian")), output)
    written = {path.name: path.read_text() for path in output.glob("*.py")}
    assert written == standalone.code_of("surgery_gated_deltanet")
    config = json.loads((output / "config.json").read_text())
    assert config["auto_map"] == standalone.auto_map("surgery_gated_deltanet")
    card = (output / "README.md").read_text()
    assert f"`{standalone.digest_of(written)}`" in card and "trust_remote_code=True" in card
    bare(BARE, output, tmp_path / "bare.safetensors")
    same(here(output, tmp_path / "here.safetensors"), load_file(tmp_path / "bare.safetensors"))


def test_without_code(make_run, quick, tmp_path):
    output = tmp_path / "out"
    export(str(make_run()), output, code=False)
    assert not list(output.glob("*.py"))
    assert "auto_map" not in json.loads((output / "config.json").read_text())
    assert "trust_remote_code" not in (output / "README.md").read_text()


@pytest.mark.parametrize("order", ["package first", "code first"])
def test_package_and_code_in_one_process(make_run, quick, tmp_path, order):
    """Registered classes win, trusted or not; each copy of the code has operators of its own."""
    output = tmp_path / "out"
    export(str(make_run()), output)
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM as Auto\n"
        "def load(**options):\n"
        "    model = Auto.from_pretrained(sys.argv[1], **options).eval()\n"
        "    return type(model).__module__.split('.')[0], model(torch.arange(9)[None]).logits\n"
    )
    first = "copy, theirs = load(trust_remote_code=True)\nassert copy == 'transformers_modules', copy\n"
    then = (
        "import surgery\nfor options in ({}, {'trust_remote_code': True}, {'trust_remote_code': False}):\n"
        "    own, ours = load(**options)\n    assert own == 'surgery', own\n"
    )
    both = (
        "assert torch.equal(ours, theirs)\n"
        "spaces = {name.split('::')[0] for name in torch._C._dispatch_get_all_op_names()}\n"
        "assert sum(space.startswith('surgery') for space in spaces) == 2, spaces\n"
    )
    text = code + (then if order == "package first" else first + then + both) + "print('both')"
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "SURGERY_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", text, str(output)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["both"]


# both in one process, the second once more from where transformers saved it, and the first after the second
BOTH = (
    BARE
    + """
other = measure(sys.argv[3], sys.argv[4], trust_remote_code=True)
other.save_pretrained(sys.argv[5])
AutoTokenizer.from_pretrained(sys.argv[3]).save_pretrained(sys.argv[5])
again = measure(sys.argv[5], sys.argv[6], trust_remote_code=True)
assert type(again) is not type(other) and type(again).__name__ == type(other).__name__
measure(sys.argv[1], sys.argv[7], trust_remote_code=True)
"""
)
KERNELS = """
import os, torch
os.environ["TRITON_INTERPRET"] = "1"
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
ids = torch.arange(3, 40)[None]
with torch.no_grad():
    torch_form = model(ids).logits
    assert not any(name.endswith("_palimpsa_triton") for name in sys.modules)
    os.environ["SURGERY_KERNELS"] = "triton"
    torch.testing.assert_close(model(ids).logits, torch_form, rtol=1e-3, atol=1e-3)
(module,) = [module for name, module in sys.modules.items() if name.endswith("_palimpsa_triton")]
assert module.__file__.startswith(os.environ["HF_HOME"])
"""


@pytest.mark.slow
def test_both_pairs_in_one_bare_process(make_run, bare, tmp_path):
    outputs = {}
    for family, rule in (("gated_deltanet", "bayesian"), ("mamba2", "palimpsa")):
        outputs[family] = tmp_path / family
        export(str(make_run(family, rule, name=f"run-{family}")), outputs[family])
    results = [tmp_path / f"{name}.safetensors" for name in ("gdn", "mamba2", "again", "gdn-again")]
    gdn, mamba2, again, gdn_again = results
    bare(BOTH, outputs["gated_deltanet"], gdn, outputs["mamba2"], mamba2, tmp_path / "saved", again, gdn_again)
    same(here(outputs["gated_deltanet"], tmp_path / "here-gdn.safetensors"), load_file(gdn))
    same(here(outputs["mamba2"], tmp_path / "here-mamba2.safetensors"), load_file(mamba2))
    same(load_file(mamba2), load_file(again))
    same(load_file(gdn), load_file(gdn_again))
    saved = {path.name: path.read_text() for path in (tmp_path / "saved").glob("*.py")}
    assert saved == standalone.code_of("surgery_mamba2")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_run_from_the_copy(make_run, bare, tmp_path):
    """In Triton's interpreter; it reads each kernel's source from its file, as its compiler does."""
    export(str(make_run("mamba2", "palimpsa")), tmp_path / "out")
    bare(KERNELS, tmp_path / "out", more=("triton",))
