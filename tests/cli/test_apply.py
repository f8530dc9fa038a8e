"""``surgery apply``: the swap on tiny random models, byte for byte, and its drift."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

EXACT = [("mamba2", "palimpsa"), ("mamba2", "bayesian"), ("gated_deltanet", "bayesian"), ("mamba2", "host"),
         ("gated_deltanet", "host")]  # fmt: skip
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE")


def raw_tensors(directory):
    """name -> (dtype, shape, bytes) of every tensor in a directory."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
                found[name] = (str(tensor.dtype), tuple(tensor.shape), data)
    return found


@pytest.mark.parametrize(("family", "rule"), EXACT)
def test_exact_start_computes_the_bases_function(family, rule, bases, recipe_for, surgery, tmp_path):
    out = tmp_path / "out"
    result = surgery("apply", recipe_for(bases[family], rule), "--output", out, "--json", "-")
    assert result.code == 0, result.err
    report = result.json  # stdout holds JSON alone
    assert report["exact"] and report["reason"] is None and report["dose"] == 0
    assert report["drift"]["kl"] < 1e-6
    assert report["drift"]["max_logit_difference"] < 1e-3
    assert abs(report["drift"]["perplexity_ratio"] - 1) < 1e-5
    assert report["max_drift"] == 1e-6

    before, after = raw_tensors(bases[family]), raw_tensors(out)
    assert {name: after[name] for name in before} == before
    added = set(after) - set(before)
    prefixes = {f"backbone.layers.{i}.mixer.memory." if family == "mamba2" else f"model.layers.{i}.attn.memory."
                for i in (1, 3)}  # fmt: skip
    assert {name[: name.index("memory.") + 7] for name in added} == prefixes
    assert added == {tensor["name"] for tensor in report["added"]}
    for name in COMPANIONS:
        assert (out / name).read_bytes() == (bases[family] / name).read_bytes()
    assert (out / "surgery_recipe.yaml").read_bytes() == (tmp_path / "recipe.yaml").read_bytes()

    def no_constant(text):
        raise AssertionError(f"{text} is not JSON")

    config = json.loads((out / "config.json").read_text(), parse_constant=no_constant)
    assert config["model_type"] == f"surgery_{family}"
    assert config["surgery"]["layers"] == [1, 3] and config["surgery"]["rule"] == rule


@pytest.mark.parametrize(("family", "rule", "start", "words"), [
    ("gated_deltanet", "palimpsa", "exact", ["no error correction", "approximate"]),
    ("gated_deltanet", "bayesian", "paper", ["start: paper", "dose 1"]),
    ("mamba2", "palimpsa", "paper", ["start: paper", "dose 1"]),
    ("mamba2", "bayesian", "paper", ["start: paper", "dose 1"]),
])  # fmt: skip
def test_other_starts_say_how_far_and_why(family, rule, start, words, bases, recipe_for, surgery, tmp_path):
    recipe = recipe_for(bases[family], f"{rule}, start: {start}")
    result = surgery("apply", recipe, "--output", tmp_path / "out", "--json", "-")
    assert result.code == 0, result.err
    report = result.json
    assert not report["exact"] and report["max_drift"] is None
    assert report["drift"]["kl"] > 1e-5  # so that the bound on the exact starts means something
    card = (tmp_path / "out" / "README.md").read_text()
    for word in words:
        assert word in report["reason"] and word in card


def test_shards_are_copied_and_renamed(bases, recipe_for, surgery, tmp_path):
    base, out = bases["gated_deltanet"], tmp_path / "out"
    shards = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(shards) > 1
    surgery("apply", recipe_for(base, "bayesian"), "--output", out, "--drift", "skip")
    total = len(shards) + 1
    for number, name in enumerate(shards, 1):
        written = out / f"model-{number:05d}-of-{total:05d}.safetensors"
        assert written.read_bytes() == (base / name).read_bytes()
    extra = out / f"model-{total:05d}-of-{total:05d}.safetensors"
    assert all(".memory." in name for name in load_file(extra))
    assert extra.stat().st_mode == written.stat().st_mode
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = raw_tensors(out)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())


def test_added_projections_take_the_mixers_dtype(bases, recipe_for, surgery, tmp_path):
    surgery("apply", recipe_for(bases["gated_deltanet"]), "--output", tmp_path / "out", "--drift", "skip")
    dtypes = {name.split("memory.")[1]: dtype for name, (dtype, _, _) in raw_tensors(tmp_path / "out").items()
              if "memory." in name}  # fmt: skip
    assert dtypes["b_proj.weight"] == "torch.bfloat16"
    assert {dtypes[name] for name in ("dose", "b_scale", "Ip_log")} == {"torch.float32"}


def test_the_seed_decides_what_is_drawn(bases, recipe_for, surgery, tmp_path):
    drawn = []
    for number, seed in enumerate((1, 1, 2)):
        out = tmp_path / f"out{number}"
        torch.manual_seed(number)
        surgery("apply", recipe_for(bases["mamba2"], more=f"seed: {seed}\n"), "--output", out, "--drift", "skip")
        drawn.append({name: value for name, value in raw_tensors(out).items() if "memory." in name})
    assert drawn[0] == drawn[1] != drawn[2]
    layers = [[value for name, value in sorted(drawn[0].items()) if f".{layer}." in name] for layer in (1, 3)]
    assert layers[0] != layers[1]


def test_auto_classes_load_it_in_a_fresh_process(bases, recipe_for, surgery, tmp_path):
    for family, base in bases.items():
        out = tmp_path / family
        assert surgery("apply", recipe_for(base, "bayesian"), "--output", out, "--drift", "skip").code == 0
    code = (
        "import sys, torch, surgery\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "for path in sys.argv[1:]:\n"
        "    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)\n"
        "    assert not any(info[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), info\n"
        "    ids = torch.tensor([AutoTokenizer.from_pretrained(path)('hello there')['input_ids']])\n"
        "    print(type(model).__name__, model(ids).logits.isfinite().all().item())\n"
    )
    command = [sys.executable, "-c", code, *(str(tmp_path / family) for family in bases)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["SurgeryMamba2ForCausalLM", "True", "SurgeryGatedDeltaNetForCausalLM", "True"]


def test_layerwise_drift(bases, recipe_for, surgery, tmp_path):
    for start, low, high in (("exact", 0, 1e-5), ("paper", 1e-3, 10)):
        recipe = recipe_for(bases["mamba2"], f"palimpsa, start: {start}")
        out = tmp_path / start
        result = surgery("apply", recipe, "--output", out, "--drift", "layerwise", "--json", "-")
        assert result.code == 0, result.err
        errors = result.json["drift"]["relative_error"]
        assert set(errors) == {"1", "3"}
        assert all(low <= error < high for error in errors.values())


@pytest.mark.parametrize("family", ["mamba2", "gated_deltanet"])
def test_layerwise_drift_is_that_of_whole_models(family, bases, recipe_for, surgery, tmp_path):
    from surgery.drift import windows
    from surgery.hosts import adapter_for, load_model, read_config

    out = tmp_path / "out"
    recipe = recipe_for(bases[family], "bayesian, start: paper")
    result = surgery("apply", recipe, "--output", out, "--drift", "layerwise", "--json", "-")
    assert result.code == 0, result.err
    base, swapped = (load_model(path, dtype=torch.float32) for path in (bases[family], out))
    adapter = adapter_for(read_config(out))
    pairs = {1: [], 3: []}

    def keep(layer):
        return lambda module, args, output: pairs[layer].append((output, adapter.mixers(swapped)[layer](args[0])))

    for layer in pairs:
        adapter.mixers(base)[layer].register_forward_hook(keep(layer))
    with torch.no_grad():
        for window in windows(bases[family], "bundled")[1]:
            base(window[None], use_cache=False)
    for layer, found in pairs.items():
        given, answer = (torch.cat(side).double() for side in zip(*found, strict=True))
        expected = float((answer - given).norm() / given.norm())
        assert result.json["drift"]["relative_error"][str(layer)] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("free", [1000, 1 << 50])
def test_what_does_not_fit_is_streamed_for_the_drift(free, bases, recipe_for, surgery, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.checkpoint.fitting.available_bytes", lambda _: free)
    recipe = recipe_for(bases["mamba2"], "bayesian, start: paper")
    result = surgery("apply", recipe, "--output", tmp_path / "out", "--json", "-")
    assert result.code == 0, result.err
    assert ("read from the disk" in result.err) == (free == 1000)
    monkeypatch.undo()
    again = surgery("apply", recipe, "--output", tmp_path / "again", "--json", "-").json
    assert result.json["drift"] == again["drift"]


def test_layers_by_horizon(bases, recipe_for, surgery, tmp_path):
    chosen = {}
    for choice in ("{top: 2}", "{bottom: 2}", "{top: 4, by: log-mean}", "{random: 2, seed: 5}"):
        recipe = recipe_for(bases["mamba2"], layers=choice, more="data: bundled\ninspection: {tokens: 1k}\n")
        result = surgery("apply", recipe, "--dry-run", "--json", "-")
        assert result.code == 0, result.err
        chosen[choice] = result.json
    figures = {int(layer): value for layer, value in chosen["{top: 2}"]["horizons"]["mean"].items()}
    ordered = sorted(figures, key=figures.get)
    assert chosen["{top: 2}"]["layers"] == sorted(ordered[2:])
    assert chosen["{bottom: 2}"]["layers"] == sorted(ordered[:2])
    assert chosen["{top: 4, by: log-mean}"]["layers"] == [0, 1, 2, 3]
    assert len(set(chosen["{random: 2, seed: 5}"]["layers"])) == 2
    assert chosen["{random: 2, seed: 5}"]["horizons"] is None


def test_plan_is_printed_and_a_dry_run_writes_nothing(bases, recipe_for, surgery, tmp_path):
    recipe = recipe_for(bases["mamba2"])
    before = sorted(tmp_path.iterdir())
    result = surgery("apply", recipe, "--output", tmp_path / "out", "--dry-run")
    assert result.code == 0, result.err
    assert sorted(tmp_path.iterdir()) == before
    for word in ("backbone.layers.3.mixer.", "memory.b_proj.weight", "added", "kept", "in_proj.weight", "peak memory",
                 "byte for byte", "nothing was written"):  # fmt: skip
        assert word in result.out
    report = surgery("apply", recipe, "--dry-run", "--json", "-").json
    written = surgery("apply", recipe, "--output", tmp_path / "out", "--json", "-").json
    assert written["added"] == report["added"]
    size = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*"))
    assert 0.7 * size < report["bytes_written"] < 1.5 * size + 20_000


def test_drift_above_the_limit_leaves_nothing(bases, recipe_for, surgery, tmp_path):
    recipe = recipe_for(bases["mamba2"], "palimpsa, start: paper", more="max_drift:\n  kl: 1.0e-9\n")
    before = sorted(tmp_path.iterdir())
    result = surgery("apply", recipe, "--output", tmp_path / "new" / "out")
    result.refused(1, f"{recipe}:5: ", "nats a token", "limit of 1e-09", "start: paper", "nothing was written")
    assert sorted(tmp_path.iterdir()) == before


def test_card_says_what_it_is(bases, recipe_for, surgery, tmp_path):
    recipe = recipe_for(bases["mamba2"])
    surgery("apply", recipe, "--output", tmp_path / "out", "--set", "seed=4")
    card = (tmp_path / "out" / "README.md").read_text()
    for word in ("layers 1, 3", "palimpsa", "at dose 0", "Nothing was trained", "KL, nats a token", "seed=4",
                 "surgery_recipe.yaml"):  # fmt: skip
        assert word in card
