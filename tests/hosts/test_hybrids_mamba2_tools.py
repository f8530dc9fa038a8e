"""The tools on hybrids with Mamba-2 mixers: training, export and the command line, end to end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hosts_battery import raw_tensors, read_tensor, write_recipe, write_tokenizer
from hosts_case_hybrids_mamba2 import BY_NAME, CHOSEN
from transformers import AutoModelForCausalLM

from surgery import hosts
from surgery.operation import apply
from surgery.recipe import load_recipe


@pytest.fixture(scope="session", params=CHOSEN)
def hybrid(request):
    return BY_NAME[request.param]


@pytest.fixture(scope="session")
def base(hybrid, base_of):
    return base_of(hybrid)


@pytest.fixture
def prose(tmp_path):
    """A text file of some thousand tokens in a few documents."""
    words = ["".join(chr(97 + int(n)) for n in torch.randint(0, 26, (4,))) for _ in range(30)]
    documents = [" ".join(words[int(n)] for n in torch.randint(0, 30, (150,))) + ".\n" for _ in range(8)]
    path = tmp_path / "text.txt"
    path.write_text("\x1e\n".join(documents))
    return path


def test_a_run_trains_the_swapped_mixers_and_resumes(hybrid, base, tmp_path, prose):
    from surgery.adaptation.monitoring import Listener
    from surgery.adaptation.phases import Options
    from surgery.adaptation.run import distill

    class Stopped(Exception):
        pass

    def stop(step, steps):
        if step.step == 2:
            raise Stopped

    kinds = ("hidden", "logits", "next-token")
    phases = [
        {"kind": kind, "steps": 3, "context": 32, "batch": 128, "warmup": 1, "learning_rate": 3.0e-3} for kind in kinds
    ]
    recipe = load_recipe(write_recipe(tmp_path, base, hybrid.swapped, data=str(prose), phases=phases))
    run = tmp_path / "run"
    with pytest.raises(Stopped):
        distill(
            recipe, run, options=Options(micro_batch=2, save_every=1, watchers=lambda _: [Listener(stop)]),
            evaluate=False,
        )  # fmt: skip
    said = []
    result = distill(recipe, run, options=Options(micro_batch=2, save_every=1, say=said.append), evaluate=False)
    assert any("resuming after step" in line for line in said)
    assert not any("second copy" in line for line in said)
    assert [phase["status"] for phase in result["manifest"]["phases"]] == ["finished"] * len(kinds)
    before, after = raw_tensors(run / "applied"), raw_tensors(run / "phases" / f"0{len(kinds)}-{kinds[-1]}" / "model")
    config = hosts.read_config(run / "applied")
    adapter = hosts.adapter_for(config)
    mine = tuple(adapter.tensor_prefix(config, layer) for layer in hybrid.swapped)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed and all(name.startswith(mine) for name in changed)
    assert {name for name in before if name.startswith(mine) and name.endswith(("A_log", "in_proj.weight"))} <= changed
    with torch.no_grad():
        assert torch.isfinite(hosts.load_model(result["model"])(torch.arange(3, 40)[None]).logits).all()


def test_exports_reload_without_the_tools_and_generate_the_same(tmp_path, monkeypatch):
    """One plain process for all: nothing but ``import surgery`` before transformers' own loading."""
    from surgery.export import verify
    from surgery.export.run import export

    # the export's own check would start a process each; all are reloaded in one below
    monkeypatch.setattr(
        verify,
        "reload_logits",
        lambda path, ids, code: verify.model_logits(AutoModelForCausalLM.from_pretrained(path), ids),
    )
    text = torch.randint(3, 256, (1, 12))
    expected = {}
    for name in CHOSEN:
        folder = tmp_path / name
        folder.mkdir()
        BY_NAME[name].write(folder / "base")
        write_tokenizer(folder / "base")
        apply(
            load_recipe(write_recipe(folder, folder / "base", BY_NAME[name].swapped)), folder / "applied", drift="skip"
        )
        export(str(folder / "applied"), folder / "out", dtype="float32")
        model = hosts.load_model(folder / "out")
        expected[name] = model.generate(text, max_new_tokens=8, do_sample=False).tolist()
        shutil.rmtree(folder / "base")
    script = f"""
import json, torch
import surgery
from transformers import AutoModelForCausalLM
found = {{}}
for name in {list(CHOSEN)!r}:
    model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r} + "/" + name + "/out")
    found[name] = model.generate(torch.tensor({text.tolist()!r}), max_new_tokens=8, do_sample=False).tolist()
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def test_the_command_line_end_to_end(tmp_path, prose, capsys, monkeypatch):
    """inspect, validate, apply, distill, eval, export, on the family whose names differ most on disk."""
    from surgery.cli import main

    base = tmp_path / "base"
    case = BY_NAME["nemotron_h-experts"]
    case.write(base)
    write_tokenizer(base)

    def surgery(*arguments):
        monkeypatch.setattr(sys, "argv", ["surgery", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        assert stop.value.code in (0, None), err
        return json.loads(out)

    shown = surgery("inspect", base, "--text", prose, "--tokens", "256", "--json", "-")
    assert [row["layer"] for row in shown["layers"]] == list(case.layers)
    phases = [{"kind": "hidden", "steps": 2, "context": 32, "batch": 64, "warmup": 0, "learning_rate": 1.0e-3}]
    recipe = write_recipe(
        tmp_path, base, case.swapped, data=str(prose), phases=phases,
        evaluation={"text": str(prose), "recall": {"lengths": [256]}},
    )  # fmt: skip
    surgery("validate", recipe, "--json", "-")
    surgery("apply", recipe, "--output", tmp_path / "applied", "--json", "-")
    run = tmp_path / "run"
    surgery("distill", recipe, "--run", run, "--no-evaluation", "--json", "-")
    options = ("--text", prose, "--tokens", 2000, "--context", 64, "--recall-lengths", 256, "--recall-samples", 1)
    figures = surgery("eval", run / "phases" / "01-hidden" / "model", *options, "--json", "-")
    assert figures["model"]["perplexity"] > 1 and figures["model"]["bytes"] > 1000
    surgery("export", run, "--output", tmp_path / "out", "--dtype", "float32", "--json", "-")
    assert hosts.load_model(tmp_path / "out").config.model_type == "surgery_nemotron_h"


def test_experts_that_a_model_stacks_are_trained_and_written_one_by_one(tmp_path, prose):
    from surgery.adaptation.run import distill

    base = tmp_path / "base"
    case = BY_NAME["nemotron_h-experts"]
    case.write(base)
    write_tokenizer(base)
    phases = [{"kind": "next-token", "steps": 2, "context": 32, "batch": 64, "warmup": 0, "learning_rate": 1.0e-3}]
    recipe = write_recipe(tmp_path, base, case.swapped, data=str(prose), phases=[phases[0] | {"trainable": "all"}])
    result = distill(load_recipe(recipe), tmp_path / "run", evaluate=False)
    trained = Path(result["model"])
    before, after = raw_tensors(tmp_path / "run" / "applied"), raw_tensors(trained)
    assert before.keys() == after.keys()
    for name in ("experts.0.up_proj", "experts.3.down_proj", "shared_experts.up_proj"):
        name = f"backbone.layers.4.mixer.{name}.weight"
        assert before[name][1] == after[name][1] and before[name] != after[name]
    stacked = hosts.load_model(trained, dtype=torch.float32).model.layers[4].mixer.experts.up_proj
    assert torch.equal(stacked[2], read_tensor(trained, "backbone.layers.4.mixer.experts.2.up_proj.weight"))
