"""A run on a CUDA device: the CPU's losses in float32, and bfloat16 autocast over float32 weights, resumed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from surgery.adaptation import trainer
from surgery.adaptation.monitoring import Listener, read_metrics
from surgery.adaptation.phases import Options
from surgery.adaptation.run import distill

pytestmark = pytest.mark.gpu

KINDS = ("hidden", "logits", "next-token")
FAMILIES = [("mamba2", "palimpsa"), ("gated_deltanet", "bayesian")]


class Stopped(Exception):
    pass


def losses(run, of="loss"):
    folders = [run / "phases" / f"{number:02d}-{kind}" for number, kind in enumerate(KINDS, 1)]
    return torch.tensor([[row[of] for row in read_metrics(folder / "metrics.jsonl")] for folder in folders])


@pytest.mark.parametrize(("family", "rule"), FAMILIES)
def test_float32_on_a_gpu_follows_the_cpu(make_base, make_recipe, phase, tmp_path, monkeypatch, family, rule):
    # at this rate the weights hardly move, so that rounding cannot send the two runs apart; the dose does move
    phases = [phase(kind, learning_rate=1.0e-6) for kind in KINDS]
    recipe = make_recipe(make_base(family), phases, memory={"rule": rule})
    original = trainer.Settings
    monkeypatch.setattr(trainer, "Settings", lambda *given, **named: original(*given, **{**named, "half": False}))
    distill(recipe, tmp_path / "cpu", options=Options(micro_batch=2), evaluate=False)
    options = Options(device="cuda", micro_batch=2)
    distill(recipe, tmp_path / "cuda", start=str(tmp_path / "cpu" / "applied"), options=options, evaluate=False)
    # products in tf32, where a kernel takes them, are off by up to 2e-3
    torch.testing.assert_close(losses(tmp_path / "cuda"), losses(tmp_path / "cpu"), rtol=2e-2, atol=3e-3)


@pytest.mark.parametrize(("family", "rule"), FAMILIES)
def test_a_bfloat16_run_resumes_and_keeps_float32_weights(make_base, make_recipe, phase, tmp_path, family, rule):
    recipe = make_recipe(make_base(family), [phase(kind) for kind in KINDS], memory={"rule": rule})

    def stop(step, steps):
        if step.step == 5:
            raise Stopped

    options = {"device": "cuda", "micro_batch": 2, "save_every": 2}
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    distill(recipe, straight, options=Options(**options), evaluate=False)
    start = str(straight / "applied")
    with pytest.raises(Stopped):
        broken = Options(**options, watchers=lambda title: [Listener(stop)])
        distill(recipe, resumed, start=start, options=broken, evaluate=False)
    distill(recipe, resumed, start=start, options=Options(**options), evaluate=False)
    torch.testing.assert_close(losses(resumed), losses(straight), rtol=1e-3, atol=1e-4)
    model = straight / "phases" / "03-next-token" / "model"
    tensors = {name: t for file in model.glob("*.safetensors") for name, t in load_file(file).items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_two_gpus_compute_what_one_does(make_base, make_recipe, phase, tmp_path):
    # five sequences a step, three for one process, two for the other; weights that hardly move, as above
    phases = [phase(kind, steps=4, batch=160, learning_rate=1.0e-6) for kind in KINDS]
    recipe = make_recipe(make_base(), phases)
    alone, together = tmp_path / "alone", tmp_path / "together"
    distill = ["-c", "from surgery.cli import main; main()", "distill", str(recipe.path), "--no-evaluation"]
    options = [*distill, "--micro-batch", "2", "--device", "cuda", "--run"]
    subprocess.run([sys.executable, *options, str(alone)], check=True, timeout=600)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", "--"]
    start = ["--from", str(alone / "applied")]
    subprocess.run([*launch, sys.executable, *options, str(together), *start], check=True, timeout=600)
    torch.testing.assert_close(losses(together), losses(alone), rtol=1e-2, atol=1e-3)
    # bfloat16's rounding in two orders; a sum instead of a mean would be twice as much
    torch.testing.assert_close(losses(together, "gradient_norm"), losses(alone, "gradient_norm"), rtol=5e-2, atol=1e-3)
