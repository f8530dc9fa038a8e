"""The demo: its steps are commands that exist, and it ends with a model that generates."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from surgery.demo import FILES, commands, draw

MAIN = "import sys; from surgery.cli import main; sys.argv[0] = 'surgery'; main()"


def run(*words, timeout=60):
    return subprocess.run([sys.executable, "-c", MAIN, *words], capture_output=True, text=True, timeout=timeout)


def test_every_step_is_one_command_and_survives_a_space_in_the_path(tmp_path):
    output = tmp_path / "a demo"
    written = {str(output / name) for name in FILES}
    seen = set()
    for title, words in commands("demo-palimpsa", "bundled:tiny-mamba2", output):
        assert title
        assert words[0] in ("inspect", "apply", "distill", "eval", "export")
        seen |= {word for word in words if word in written}
    assert seen == written


def test_wrong_usage_writes_nothing(tmp_path):
    result = run("demo", "--recipe", "demo-palimsa", "--output", str(tmp_path / "new"))
    assert result.returncode == 2 and "demo-palimpsa" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "new").exists()
    (tmp_path / "kept").write_text("mine")
    result = run("demo", "--output", str(tmp_path))
    assert result.returncode == 2 and str(tmp_path) in result.stderr
    assert (tmp_path / "kept").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_the_picture_holds_every_phase(tmp_path):
    model = {"bits_per_byte": 1.5, "recall": {"lengths": [{"length": 256, "fraction": 0.5}]}}
    rows = [{"step": step, "tokens": step, "loss": 1 / step, "dose": step / 3} for step in (1, 2, 3)]
    losses = {"01-align": rows, "02-distill": rows}
    draw({"losses": losses, "models": {"base": model, "upgraded": model, "control": model}}, tmp_path / "summary.png")
    assert (tmp_path / "summary.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["demo-palimpsa", "demo-bayesian"])
def test_the_whole_demo(tmp_path, recipe):
    output = tmp_path / "demo"
    result = run("demo", "--recipe", recipe, "--output", str(output), timeout=3600)
    assert result.returncode == 0, result.stderr[-2000:]
    summary = json.loads((output / "summary.json").read_text())
    assert summary["drift"]["kl"] < 1e-6
    assert set(summary["models"]) == {"base", "upgraded", "control"}
    assert summary["generated"].startswith(summary["prompt"]) and len(summary["generated"]) > len(summary["prompt"])
    assert all(len(rows) > 2 for rows in summary["losses"].values())
    assert {"horizons.png", "summary.png", "eval.png"} <= set(os.listdir(output))
