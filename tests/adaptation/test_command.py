"""``surgery distill`` as a process: its output, a kill in the middle, several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file


def weights(directory):
    found = {}
    for shard in sorted(directory.glob("*.safetensors")):
        found |= load_file(shard)
    return found


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def command(*arguments):
    return [sys.executable, "-c", "from surgery.cli import main; main()", "distill", *map(str, arguments)]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_json_stands_alone_on_stdout(make_base, make_recipe, phase, tmp_path):
    recipe = make_recipe(make_base(), [phase("hidden", steps=2)])
    done = subprocess.run(
        command(recipe.path, "--run", tmp_path / "run", "--no-evaluation", "--json", "-"),
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["kind"] == "distill" and result["manifest"]["phases"][0]["status"] == "finished"
    assert "hidden" in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_recipe_exits_with_2_before_any_work(make_base, make_recipe, phase, tmp_path):
    recipe = make_recipe(make_base(), [phase("hidden", steps=2)])
    done = subprocess.run(
        command(recipe.path, "--run", tmp_path / "run", "--set", "phases.0.learning_rat=1"),
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=300,
    )
    assert done.returncode == 2 and not done.stdout and not (tmp_path / "run").exists()
    assert "learning_rate" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_bits(make_base, make_recipe, phase, tmp_path):
    phases = [phase("hidden", steps=40), phase("logits", steps=40)]
    recipe = make_recipe(make_base(), phases)
    options = ("--no-evaluation", "--save-every", "3", "--micro-batch", "2")
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    subprocess.run(command(recipe.path, "--run", straight, *options), check=True, env=ENVIRONMENT, timeout=600)
    for phase_folder, step in (("01-hidden", 5), ("01-hidden", 31), ("02-logits", 2), ("02-logits", 23)):
        metrics = broken / "phases" / phase_folder / "metrics.jsonl"
        process = subprocess.Popen(command(recipe.path, "--run", broken, *options), env=ENVIRONMENT)
        deadline = time.monotonic() + 300
        while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= step):
            assert process.poll() is None and time.monotonic() < deadline, f"the run ended before step {step}"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command(recipe.path, "--run", broken, *options), check=True, env=ENVIRONMENT, timeout=600)
    for name in ("01-hidden", "02-logits"):
        one, other = (run / "phases" / name for run in (straight, broken))
        assert same(weights(one / "model"), weights(other / "model"))
        rows = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (one, other)]
        steps = [[json.loads(line)["step"] for line in lines] for lines in rows]
        assert steps[0] == steps[1] == list(range(1, 41))


@pytest.mark.slow
def test_two_processes_compute_what_one_does(make_base, make_recipe, phase, tmp_path, agree):
    # five sequences a step: three for one process, two for the other
    phases = [phase(kind, steps=4, batch=160) for kind in ("hidden", "logits", "next-token")]
    recipe = make_recipe(make_base(), phases)
    alone, together = tmp_path / "alone", tmp_path / "together"
    options = ("--no-evaluation", "--device", "cpu", "--micro-batch", "2")
    subprocess.run(command(recipe.path, "--run", alone, *options), check=True, env=ENVIRONMENT, timeout=600)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", "--"]
    start = ("--from", alone / "applied")
    subprocess.run(
        [*launch, *command(recipe.path, "--run", together, *options, *start)],
        check=True,
        env=ENVIRONMENT,
        timeout=600,
    )
    agree(alone, together)
