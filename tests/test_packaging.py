"""What is installed: the editable tree, the wheel, and how both live beside transformers."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_transformers_then_surgery_from_the_repository_root():
    # transformers imports any module named kernels it can find, and the folder of that name stands in the root
    code = (
        "import transformers; from transformers import AutoModelForCausalLM, Mamba2Config\n"
        "import surgery, surgery.kernels, sys\n"
        "assert 'kernels' not in sys.modules or 'surgery' not in (sys.modules['kernels'].__file__ or '')\n"
        "from transformers.models.mamba2 import modeling_mamba2\n"
        "print(surgery.kernels.__name__)"
    )
    assert python(code, ROOT) == "surgery.kernels"


def test_import_is_light():
    code = "import sys, surgery; print(sorted({'torch', 'transformers', 'matplotlib', 'datasets'} & set(sys.modules)))"
    assert python(code, ROOT) == "[]"


LEAVES = {"errors", "places", "results", "sizes"}  # import nothing of this project
# folder -> what else its modules may import of this project; what a checkpoint needs to run never imports the tools
REACH = {
    "kernels": {"kernels"},
    "surgery/memory": {"memory", "kernels"},
    "surgery/graft": {"graft", "memory", "kernels"},
    "surgery/models": {"models", "graft", "memory", "kernels"},
    "surgery/hosts": {"hosts", "models", "graft", "memory", "kernels", "checkpoint", "bundled"},
    "surgery/checkpoint": {"checkpoint"},
    "surgery/data": {"data", "checkpoint"},
    "surgery/recipe": {"recipe", "recipes"},
}
JOBS = ("inspection", "evaluation", "adaptation", "export", "benchmark", "pretraining")


def imported(path: Path) -> set[str]:
    """The parts of this project that a file imports, wherever the statement stands."""
    return {name.split(".")[1] for name in names_imported(path) if name.startswith("surgery.")}


def names_imported(path: Path, typing: bool = True) -> list[str]:
    """Every name that a file imports, in full; those for type checkers alone only with ``typing``."""
    package = ("surgery", *(part for part in path.relative_to(ROOT).parts[:-1] if part != "surgery"))
    names: list[str] = []

    def visit(node: ast.AST) -> None:
        if not typing and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            names.extend(f"{above}{node.module or ''}.{alias.name}".replace("..", ".") for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return names


def test_no_module_imports_itself_through_others():
    files = {}
    for path in sorted([*(ROOT / "surgery").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "surgery" else ("surgery", *parts)
        files[".".join(parts).removesuffix(".__init__")] = path
    assert len(files) > 200

    def module_of(name: str) -> str:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name

    # importing a name of a package takes the module that bears it, where there is one, and else the package itself
    waiting = {name: {module_of(one) for one in names_imported(path, typing=False)} for name, path in files.items()}
    waiting = {name: found - {name, ""} for name, found in waiting.items()}
    while free := [
        name
        for name, found in waiting.items()
        if not found & waiting.keys() or not any(name in other for other in waiting.values())
    ]:
        for name in free:
            del waiting[name]
    assert not waiting, f"a circle is among {sorted(waiting)}"


def test_leaves_import_nothing_of_this_project():
    assert set().union(*(imported(ROOT / "surgery" / f"{leaf}.py") for leaf in LEAVES)) == set()


@pytest.mark.parametrize("folder", [*REACH, *(f"surgery/{job}" for job in JOBS)])
def test_imports_go_one_way(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    found = set().union(*map(imported, files))
    assert files
    if folder in REACH:
        assert found - REACH[folder] - LEAVES == set()
    else:
        assert "cli" not in found


@pytest.fixture(scope="module")
def wheel_tree(tmp_path_factory):
    """The wheel, built from a copy of the tree and unpacked."""
    copy = tmp_path_factory.mktemp("tree") / "source"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".git", ".venv", "build", "runs", "demo-output", ".*")
    shutil.copytree(ROOT, copy, ignore=ignore)
    wheels = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(copy)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    (wheel,) = wheels.glob("model_surgery-*.whl")
    target = tmp_path_factory.mktemp("site")
    shutil.unpack_archive(wheel, target, format="zip")
    return target


def test_wheel_carries_kernels_recipes_and_bases(wheel_tree):
    installed = {path.relative_to(wheel_tree).as_posix() for path in wheel_tree.rglob("*") if path.is_file()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    expected = {
        path.replace("kernels/", "surgery/kernels/", 1) if path.startswith("kernels/") else path
        for path in tracked
        if path.endswith(".py") and path.startswith(("kernels/", "surgery/", "surgery_autoload"))
    }
    expected |= {f"surgery/{path}" for path in tracked if path.startswith("recipes/") and path.endswith(".yaml")}
    bases = (path for path in tracked if path.startswith("surgery/bundled/"))
    expected |= {path for path in bases if path.endswith((".json", ".safetensors", ".md"))}
    assert expected - installed == set()
    assert not any(name.startswith("kernels/") for name in installed)


SMALL = "num_heads=4, head_dim=16, hidden_size=32, state_size=8, n_groups=1, num_hidden_layers=1, vocab_size=64"
MADE = f"AutoModelForCausalLM.from_config(AutoConfig.for_model('surgery_mamba2', {SMALL}))"
STARTS = {
    "torch first": "import torch; from transformers import AutoConfig, AutoModelForCausalLM",
    # torch is imported, and calls the entry point, in the middle of the table of configurations
    "the table first": "from transformers import AutoConfig; AutoConfig.for_model('surgery_bamba'); "
    "from transformers import AutoModelForCausalLM",
    "a pipeline first": "from transformers import pipeline, AutoModelForCausalLM, AutoConfig",
}


@pytest.mark.parametrize("start", STARTS)
def test_installed_models_are_known_without_an_import(wheel_tree, tmp_path, start):
    code = f"{STARTS[start]}; print(type({MADE}).__module__, __import__('sys').modules['surgery'].__file__)"
    module, place = python(code, tmp_path, PYTHONPATH=str(wheel_tree)).split()
    assert module == "surgery.models.mamba2" and place.startswith(str(wheel_tree))


def test_autoload_is_cheap_and_can_be_turned_off(wheel_tree, tmp_path):
    code = (
        "import sys, time, torch, surgery_autoload\n"
        "assert 'surgery' not in sys.modules, 'SURGERY_AUTOLOAD=0 was not heeded'\n"
        "import os; del os.environ['SURGERY_AUTOLOAD']; took = []\n"
        "for _ in range(20):\n"
        "    start = time.perf_counter(); surgery_autoload.autoload(); took.append(time.perf_counter() - start)\n"
        "    assert not {'transformers', 'surgery.models'} & set(sys.modules)\n"
        "    del sys.modules['surgery'], sys.modules['surgery.registration'], sys.meta_path[0]\n"
        "print(min(took) * 1000)"
    )
    assert float(python(code, tmp_path, PYTHONPATH=str(wheel_tree), SURGERY_AUTOLOAD="0")) < 1


def test_autoload_never_stops_torch(tmp_path):
    """A broken installation is a warning."""
    (tmp_path / "surgery.py").write_text("raise SyntaxError('half a file')")
    shutil.copy(ROOT / "surgery_autoload.py", tmp_path)
    code = "import warnings, surgery_autoload\nwith warnings.catch_warnings(record=True) as said:\n"
    code += "    warnings.simplefilter('always'); surgery_autoload.autoload()\nprint(said[0].message)"
    assert "half a file" in python(code, tmp_path)


def test_wheel_runs_away_from_the_tree(wheel_tree, tmp_path):
    code = (
        "import surgery, surgery.kernels.palimpsa.reference as k, importlib.resources as r\n"
        "assert surgery.__file__.startswith(__import__('os').environ['PYTHONPATH']), surgery.__file__\n"
        "print(len([f for f in r.files('surgery.recipes').iterdir() if f.name.endswith('.yaml')]) > 0)"
    )
    assert python(code, tmp_path, PYTHONPATH=str(wheel_tree)) == "True"
