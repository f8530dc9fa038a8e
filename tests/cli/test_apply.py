"""``surgery apply``: the swap on tiny random models, byte for byte, its drift, and everything that stops it."""

from __future__ import annotations

import builtins
import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

EXACT = [("mamba2", "palimpsa"), ("mamba2", "bayesian"), ("gated_deltanet", "bayesian"), ("mamba2", "host"),
         ("gated_deltanet", "host")]  # fmt: skip
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE")


@pytest.fixture
def base(bases, tmp_path):
    """A private copy of a base, to be damaged."""

    def copy(family="mamba2"):
        return shutil.copytree(bases[family], tmp_path / "base")

    return copy


@pytest.fixture
def recipe_for(write_recipe):
    def write(model, rule="palimpsa", layers="[1, 3]", more=""):
        return write_recipe(f"model: {model}\nlayers: {layers}\nmemory: {{rule: {rule}}}\n{more}")

    return write


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


def refused(result, code, *words):
    assert result.code == code, result.err
    assert len(result.err.splitlines()) <= 5, result.err
    assert result.err.startswith("error: "), result.err
    assert "Traceback" not in result.err
    for word in words:
        assert str(word) in result.err, result.err


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
    refused(result, 1, f"{recipe}:5: ", "nats a token", "limit of 1e-09", "start: paper", "nothing was written")
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_overwritten(bases, recipe_for, surgery, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")
    refused(surgery("apply", recipe_for(bases["mamba2"]), "--output", out), 2, out, "not empty")
    refused(surgery("apply", recipe_for(bases["mamba2"]), "--output", out / "mine"), 2, "is a file")
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("mine", "precious")]
    refused(surgery("apply", recipe_for(bases["mamba2"])), 2, "--output is missing", "--dry-run")
    refused(surgery("apply", recipe_for(bases["mamba2"]), "--dry-run", "--drift", "some"), 2, "full, layerwise or skip")
    refused(surgery("apply", recipe_for(bases["mamba2"]), "--dry-run", "--device", "tpu"), 2, "auto, cpu or cuda")


def wrong_base(family, damage, *words):
    return pytest.param(family, damage, words, id=damage.__name__)


def config_edit(**changes):
    def edit(base):
        path = base / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def named(name, function):
    function.__name__ = name
    return function


def missing_shard(base):
    sorted(base.glob("*.safetensors"))[1].unlink()


def truncated_shard(base):
    path = sorted(base.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-10])


def wrong_shape(base):
    tensors = load_file(base / "model.safetensors")
    tensors["backbone.layers.2.mixer.in_proj.weight"] = torch.zeros(5, 6)
    save_file(tensors, base / "model.safetensors")


def wrong_dtype(base):
    tensors = load_file(base / "model.safetensors")
    tensors["backbone.layers.2.mixer.D"] = torch.zeros(4, dtype=torch.int8)
    save_file(tensors, base / "model.safetensors")


def missing_tensor(base):
    tensors = load_file(base / "model.safetensors")
    del tensors["backbone.layers.2.mixer.D"]
    save_file(tensors, base / "model.safetensors")


def unknown_tensor(base):
    tensors = load_file(base / "model.safetensors")
    tensors["backbone.layers.3.mixer.gate.weight"] = torch.zeros(4)
    save_file(tensors, base / "model.safetensors")


def large_tokenizer(base):
    path = base / "tokenizer.json"
    document = json.loads(path.read_text())
    document["added_tokens"][0]["id"] = 260
    path.write_text(json.dumps(document))


def broken_tokenizer(base):
    (base / "tokenizer.json").write_text("{}")


def pickled(base):
    (base / "model.safetensors").rename(base / "pytorch_model.bin")


@pytest.mark.parametrize(("family", "damage", "words"), [
    wrong_base("gated_deltanet", missing_shard, "shards missing", "model-00002-of-"),
    wrong_base("gated_deltanet", truncated_shard, "truncated"),
    wrong_base("mamba2", wrong_shape, "layers.2.mixer.in_proj.weight", "[5, 6]", "implies"),
    wrong_base("mamba2", wrong_dtype, "layers.2.mixer.D", "I8", "unquantised"),
    wrong_base("mamba2", missing_tensor, "layers.2.mixer.D", "missing"),
    wrong_base("mamba2", unknown_tensor, "layers.3.mixer.gate.weight", "no use"),
    wrong_base("mamba2", large_tokenizer, "token 260", "vocab_size 260", "another model"),
    wrong_base("mamba2", broken_tokenizer, "tokenizer.json", "not a tokenizer"),
    wrong_base("mamba2", pickled, "pytorch_model.bin", "run code"),
    wrong_base("mamba2", named("unsupported", config_edit(model_type="llama")), "llama", "supported:", "gated_delta"),
    wrong_base("mamba2", named("no_model_type", config_edit(model_type=None)), "model_type", "supported:", "mamba2"),
    wrong_base("mamba2", named("impossible", config_edit(num_heads=5)), "config.json"),
    wrong_base("mamba2", named("swapped_before", config_edit(
        model_type="surgery_mamba2", surgery={"schema": 1, "rule": "palimpsa", "layers": [0]})),
        "layers.0.mixer.memory.", "are missing"),
])  # fmt: skip
def test_wrong_base(family, damage, words, base, recipe_for, surgery, tmp_path):
    directory = base(family)
    damage(directory)
    recipe = recipe_for(directory)
    before = sorted(tmp_path.iterdir())
    for command in (("validate", recipe), ("apply", recipe, "--output", tmp_path / "out")):
        result = surgery(*command)
        refused(result, 2, f"{recipe}:1: model: ", *words)
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("layers", "place", "words"), [
    ("[1, 9]", "2: layers[1]", ["layer 9 does not exist", "0 to 3", "0-3"]),
    ("{top: 5}", "2: layers.top", ["5 layers are asked for", "has 4", "0-3"]),
    ("{random: 7}", "2: layers.random", ["has 4"]),
])  # fmt: skip
def test_wrong_layers(layers, place, words, bases, recipe_for, surgery, tmp_path):
    recipe = recipe_for(bases["mamba2"], layers=layers, more="data: bundled\n")
    for command in (("validate", recipe), ("apply", recipe, "--output", tmp_path / "out")):
        refused(surgery(*command), 2, f"{recipe}:{place}: ", *words)
    assert not (tmp_path / "out").exists()


def test_layer_without_a_mixer(bases, recipe_for, surgery, monkeypatch):
    from surgery.hosts.mamba2 import Mamba2Adapter

    monkeypatch.setattr(Mamba2Adapter, "mixer_layers", lambda self, config: [0, 1, 2])
    refused(surgery("validate", recipe_for(bases["mamba2"])), 2, "layers[1]: layer 3 holds no mixer", "0-2")


def test_options_that_do_not_fit_the_host(bases, recipe_for, surgery):
    recipe = recipe_for(bases["mamba2"], "bayesian, noise_groups: 3")
    refused(surgery("validate", recipe), 2, f"{recipe}:3: memory", "noise_groups", "does not divide")


def test_text_that_is_missing_or_too_short(bases, recipe_for, surgery, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("too short\n")
    for name, words in ((short, ["10 tokens", "shorter than one context"]), (tmp_path / "none.txt", ["no such file"])):
        recipe = recipe_for(bases["mamba2"], more=f"evaluation: {{text: {name}}}\n")
        refused(surgery("apply", recipe, "--output", tmp_path / "out"), 2, f"{recipe}:4: evaluation.text: ", *words)
    assert not (tmp_path / "out").exists()
    recipe = recipe_for(bases["mamba2"], more=f"data: {short}\nphases: [{{kind: next-token, tokens: 1M}}]\n")
    refused(surgery("validate", recipe), 2, f"{recipe}:4: data: ", "10 tokens", "context of 2048")


def test_no_tokenizer(base, recipe_for, surgery, tmp_path):
    directory = base()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    recipe = recipe_for(directory)
    refused(surgery("apply", recipe, "--output", tmp_path / "out"), 2, "tokenizer")
    assert not (tmp_path / "out").exists()
    assert surgery("apply", recipe, "--output", tmp_path / "out", "--drift", "skip").code == 0


def test_model_that_is_not_there(recipe_for, surgery, tmp_path):
    recipe = recipe_for("nobody/nothing")
    refused(surgery("apply", recipe, "--output", tmp_path / "out"), 2, f"{recipe}:1: model: nobody/nothing")
    result = surgery("validate", recipe, "--json", "-")
    assert result.code == 0
    assert [check["checked"] for check in result.json["checks"] if check["what"] == "model"] == [False]
    refused(surgery("validate", recipe_for("bundled:nothing")), 2, "bundled:nothing")


def test_no_space(bases, recipe_for, surgery, tmp_path, monkeypatch):
    from surgery.checkpoint import staging

    recipe = recipe_for(bases["mamba2"])
    before = sorted(tmp_path.iterdir())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage._replace(free=10))
    refused(surgery("apply", recipe, "--output", tmp_path / "out"), 1, "no space left", "needed", "10 B free")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("where", ["model-00001", "model-00002", "config.json", "tokenizer.json", "README.md"])
def test_disk_that_fills_while_writing(where, bases, recipe_for, surgery, tmp_path, monkeypatch):
    recipe = recipe_for(bases["mamba2"])
    before = sorted(tmp_path.iterdir())
    real = builtins.open

    def open_(file, mode="r", *args, **kwargs):
        name = os.path.basename(str(file))
        if "partial" in str(file) and name.startswith(where) and set(mode) & set("wx+"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return real(file, mode, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", open_)
    monkeypatch.setattr("io.open", open_)  # what pathlib calls
    if where == "model-00002":  # written by safetensors itself
        from safetensors import SafetensorError

        def full(*_, **__):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        monkeypatch.setattr("safetensors.torch.save_file", full)
    refused(surgery("apply", recipe, "--output", tmp_path / "out"), 1, "no space left")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["surgery.operation.write_checkpoint", "surgery.drift.measure_drift",
                                   "surgery.operation.card"])  # fmt: skip
def test_crash_in_the_middle_leaves_nothing(error, place, bases, recipe_for, surgery, tmp_path, monkeypatch):
    recipe = recipe_for(bases["mamba2"])
    before = sorted(tmp_path.iterdir())

    def crash(*_, **__):
        raise error

    monkeypatch.setattr(place, crash)
    result = surgery("apply", recipe, "--output", tmp_path / "out")
    assert result.code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert "Traceback" not in result.err
    assert sorted(tmp_path.iterdir()) == before


def test_card_says_what_it_is(bases, recipe_for, surgery, tmp_path):
    recipe = recipe_for(bases["mamba2"])
    surgery("apply", recipe, "--output", tmp_path / "out", "--set", "seed=4")
    card = (tmp_path / "out" / "README.md").read_text()
    for word in ("layers 1, 3", "palimpsa", "at dose 0", "Nothing was trained", "KL, nats a token", "seed=4",
                 "surgery_recipe.yaml"):  # fmt: skip
        assert word in card
