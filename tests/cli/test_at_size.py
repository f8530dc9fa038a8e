"""Memory at size: what a checkpoint takes on the disk is never taken in memory.

    pytest tests/cli/test_at_size.py -m slow

Commands run in processes of their own on a checkpoint of 440 MB, sharded, in bfloat16, and their peak resident memory
is taken. It bounds: planning by what Python and its libraries take, a copy by the largest tensor beside that, and the
layerwise drift by one tensor or block, in bfloat16 as it is read and in float32 as it is used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from surgery.hosts import adapter_for, resolve

CONFIG = {
    "model_type": "mamba2",
    "hidden_size": 768,
    "num_heads": 24,
    "head_dim": 64,
    "expand": 2,
    "state_size": 128,
    "n_groups": 1,
    "num_hidden_layers": 48,
    "vocab_size": 50288,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SLACK = 60_000_000  # what libraries load on demand, and what the C library keeps of what was freed
RUN = """
import sys
from surgery.cli import main
try:
    main()
finally:  # not getrusage's figure, which the process that started this one hands on
    [line] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print("peak", int(line.split()[1]) * 1024, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A directory with the checkpoint, and bytes: all of it, its largest tensor."""
    directory = tmp_path_factory.mktemp("large")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for path in resolve("bundled:tiny-mamba2").glob("tokenizer*"):
        shutil.copy(path, directory)
    shapes = adapter_for(CONFIG).expected_tensors(CONFIG)
    shards, weights, total = 8, {}, 0
    names = sorted(shapes)
    for number in range(shards):
        shard = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        tensors = {name: torch.randn(shapes[name]).mul(0.02).bfloat16() for name in names[number::shards]}
        save_file(tensors, directory / shard, metadata={"format": "pt"})
        weights |= dict.fromkeys(tensors, shard)
        total += sum(2 * tensor.numel() for tensor in tensors.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    recipe = directory / "recipe.yaml"
    text = directory / "text.txt"
    text.write_text("It was a dark and stormy night; the rain fell in torrents, except at intervals. " * 40)
    recipe.write_text(
        f"model: {directory}\nlayers: [5, 20, 40]\nmemory: {{rule: palimpsa}}\ndata: bundled\n"
        f"evaluation: {{text: {text}}}\n"
    )
    return recipe, total, max(2 * torch.Size(shape).numel() for shape in shapes.values())


def peak(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_peak_memory_does_not_grow_with_the_checkpoint(large, tmp_path):
    recipe, total, largest = large
    idle = peak("apply", "demo-bayesian", "--dry-run")  # a model of 5M parameters
    assert largest < 80e6 and total > 400e6
    for arguments in (["inspect", recipe.parent, "--static"], ["validate", recipe], ["apply", recipe, "--dry-run"]):
        assert peak(*arguments) < idle + SLACK
    copied = peak("apply", recipe, "--output", tmp_path / "copied", "--drift", "skip")
    assert copied < idle + largest + SLACK
    layerwise = peak("apply", recipe, "--output", tmp_path / "layerwise", "--drift", "layerwise")
    activations = 400 * 512 * CONFIG["hidden_size"]
    assert layerwise < idle + 3 * largest + activations + SLACK < idle + 2 * total  # what the weights take in float32
