"""A run on a CUDA device: bfloat16 autocast over float32 weights, and the CPU's losses within its precision."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from surgery.adaptation.monitoring import Listener, read_metrics
from surgery.adaptation.phases import Options
from surgery.adaptation.run import distill

pytestmark = pytest.mark.gpu


class Stopped(Exception):
    pass


@pytest.mark.parametrize(("family", "rule"), [("mamba2", "palimpsa"), ("gated_deltanet", "bayesian")])
def test_a_run_on_a_gpu_follows_the_cpu_and_resumes(make_base, make_recipe, phase, tmp_path, family, rule):
    # at this rate the weights hardly move, so that rounding cannot send the two runs apart; the dose does move
    phases = [phase(kind, learning_rate=1.0e-6) for kind in ("hidden", "logits", "next-token")]
    recipe = make_recipe(make_base(family), phases, memory={"rule": rule})

    def stop(step, steps):
        if step.step == 5:
            raise Stopped

    runs = {name: tmp_path / name for name in ("cpu", "cuda", "resumed")}
    options = Options(micro_batch=2, save_every=2)
    distill(recipe, runs["cpu"], options=options, evaluate=False)
    start = str(runs["cpu"] / "applied")
    on_gpu = {"device": "cuda", "micro_batch": 2, "save_every": 2}
    distill(recipe, runs["cuda"], start=start, options=Options(**on_gpu), evaluate=False)
    with pytest.raises(Stopped):
        broken = Options(**on_gpu, watchers=lambda title: [Listener(stop)])
        distill(recipe, runs["resumed"], start=start, options=broken, evaluate=False)
    distill(recipe, runs["resumed"], start=start, options=Options(**on_gpu), evaluate=False)
    for number, kind in enumerate(("hidden", "logits", "next-token"), 1):
        folders = {name: run / "phases" / f"{number:02d}-{kind}" for name, run in runs.items()}
        losses = {
            name: torch.tensor([row["loss"] for row in read_metrics(folder / "metrics.jsonl")])
            for name, folder in folders.items()
        }
        torch.testing.assert_close(losses["cuda"], losses["cpu"], rtol=0.05, atol=5e-3)
        torch.testing.assert_close(losses["resumed"], losses["cuda"], rtol=1e-3, atol=1e-6)
        shards = [load_file(file) for file in sorted((folders["cuda"] / "model").glob("*.safetensors"))]
        assert {tensor.dtype for shard in shards for tensor in shard.values()} == {torch.float32}
