"""``surgery revert``, and operating on a checkpoint that was operated on before."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from surgery import hosts

FAMILIES = ["mamba2", "gated_deltanet"]  # one weight file, and several in bfloat16


def raw(directory):
    """name -> (dtype, shape, bytes)."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = (tensor.dtype, tensor.shape, data)
    return found


@pytest.fixture
def swap(surgery, write_recipe, tmp_path):
    """Factory: apply a rule to layers of a base; returns the directory."""

    def make(base, layers, rule="bayesian", more="", name="swapped"):
        recipe = write_recipe(f"model: {base}\nlayers: {layers}\nmemory: {{rule: {rule}{more}}}\n", f"{name}.yaml")
        result = surgery("apply", recipe, "--output", tmp_path / name, "--drift", "skip", "--json", "-")
        assert result.code == 0, result.err
        return tmp_path / name

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_revert_of_a_swap_is_the_base(family, bases, swap, surgery, tmp_path):
    base, out = bases[family], tmp_path / "back"
    swapped = swap(base, [1, 3])
    result = surgery("revert", swapped, "--output", out, "--json", "-")
    assert result.code == 0, result.err
    assert result.json["identical"] is True and result.json["layers"] == [1, 3] and result.json["remaining"] == []
    assert len(result.json["removed"]) == len(raw(swapped)) - len(raw(base))
    assert result.err == ""
    files = sorted(path.name for path in base.glob("*.safetensors*"))
    assert sorted(path.name for path in out.glob("*.safetensors*")) == files
    for name in files:
        if name.endswith(".safetensors"):
            assert (out / name).read_bytes() == (base / name).read_bytes()
    assert json.loads((out / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    for name in ("tokenizer.json", "generation_config.json", "LICENSE"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert "byte for byte" in (out / "README.md").read_text()
    text = torch.randint(0, 256, (1, 30))
    with torch.no_grad():
        assert torch.equal(hosts.load_model(out)(text).logits, hosts.load_model(base)(text).logits)


def test_revert_of_some_layers(bases, swap, surgery, tmp_path):
    swapped = swap(bases["gated_deltanet"], [0, 1, 3])
    result = surgery("revert", swapped, "--output", tmp_path / "fewer", "--layers", "3,0")
    assert result.code == 0, result.err
    assert "layers 0, 3" in result.out and "still swapped: layers 1" in result.out
    before, after = raw(swapped), raw(tmp_path / "fewer")
    assert {name for name in before if ".memory." in name and ".layers.1." not in name} == set(before) - set(after)
    assert all(after[name] == before[name] for name in after)
    config = json.loads((tmp_path / "fewer" / "config.json").read_text())
    assert config["model_type"] == "surgery_gated_deltanet" and config["surgery"]["layers"] == [1]
    adapter = hosts.adapter_for(config)
    mixers = adapter.mixers(hosts.load_model(tmp_path / "fewer"))
    assert [mixer.memory.rule for mixer in mixers.values()] == ["host", "bayesian", "host", "host"]
    again = surgery("revert", tmp_path / "fewer", "--output", tmp_path / "none", "--json", "-")
    assert again.code == 0 and again.json["identical"] is True
    assert raw(tmp_path / "none") == raw(bases["gated_deltanet"])


def test_what_was_trained_is_said_and_kept(bases, swap, surgery, tmp_path):
    swapped = swap(bases["mamba2"], [1])
    shard = next(path for path in swapped.glob("*.safetensors") if any("in_proj" in name for name in load_file(path)))
    tensors = load_file(shard)
    name = "backbone.layers.1.mixer.in_proj.weight"
    tensors[name] += 0.5
    save_file(tensors, shard, metadata={"format": "pt"})
    result = surgery("revert", swapped, "--output", tmp_path / "back", "--json", "-")
    assert result.code == 0, result.err
    assert result.json["identical"] is False and result.json["changed"] == [name]
    assert "note:" in result.err and name in result.err and "not the base again" in result.err
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")[name], tensors[name])
    assert name in (tmp_path / "back" / "README.md").read_text()


def test_a_base_that_is_not_here_is_no_obstacle(bases, swap, surgery, tmp_path):
    swapped = swap(bases["mamba2"], [1])
    config = json.loads((swapped / "config.json").read_text())
    config["surgery"]["base"] = "some-owner/some-model"
    del config["surgery"]["replaced"]  # as releases before this command wrote it
    (swapped / "config.json").write_text(json.dumps(config))
    result = surgery("revert", swapped, "--output", tmp_path / "back", "--json", "-")
    assert result.code == 0 and result.json["identical"] is None
    assert "not known" in result.err
    assert raw(tmp_path / "back") == raw(bases["mamba2"])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "mamba2"


def test_a_shard_that_mixes_is_written_again(bases, swap, surgery, tmp_path):
    """An export puts a swapped layer's tensors beside its others."""
    swapped = swap(bases["gated_deltanet"], [2])
    assert surgery("export", swapped, "--output", tmp_path / "one", "--json", "-").code == 0
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    result = surgery("revert", tmp_path / "one", "--output", tmp_path / "back", "--json", "-")
    assert result.code == 0 and result.json["identical"] is True, result.err
    assert raw(tmp_path / "back") == raw(bases["gated_deltanet"])


@pytest.mark.parametrize(("options", "words"), [
    (("--layers", "0"), ["layer 0 was not swapped", "1, 3"]),
    (("--layers", "one"), ["write numbers"]),
    (("--layers", ""), ["no layer is named"]),
])  # fmt: skip
def test_wrong_layers_are_one_line(options, words, bases, swap, surgery, tmp_path):
    result = surgery("revert", swap(bases["mamba2"], [1, 3]), "--output", tmp_path / "back", *options)
    assert result.code == 2 and len(result.err.splitlines()) == 1 and not (tmp_path / "back").exists()
    for word in words:
        assert word in result.err


def test_what_cannot_be_reverted(bases, swap, surgery, tmp_path):
    result = surgery("revert", bases["mamba2"], "--output", tmp_path / "back")
    assert result.code == 2 and "nothing to revert" in result.err and len(result.err.splitlines()) == 1
    assert surgery("revert", bases["mamba2"]).code == 2
    swapped = swap(bases["mamba2"], [1])
    assert surgery("revert", swapped, "--output", swapped).code == 2


def test_more_layers_of_the_same_rule(bases, swap, surgery, tmp_path, write_recipe):
    base = bases["gated_deltanet"]
    first = swap(base, [1], name="first")
    second = swap(first, [3], name="second")
    config = json.loads((second / "config.json").read_text())
    surgery_of = config["surgery"]
    assert surgery_of["schema"] == 1 and surgery_of["layers"] == [1, 3] and surgery_of["base"] == str(base)
    before, after = raw(first), raw(second)
    assert all(after[name] == before[name] for name in before) and len(after) > len(before)
    at_once = raw(swap(base, [1, 3], name="at_once"))
    assert at_once == after
    back = surgery("revert", second, "--output", tmp_path / "back", "--json", "-")
    assert back.json["identical"] is True and raw(tmp_path / "back") == raw(base)
    recipe = write_recipe(f"model: {first}\nlayers: [3, 1]\nmemory: {{rule: bayesian}}\n")
    refused = surgery("apply", recipe, "--output", tmp_path / "no")
    assert refused.code == 2 and "layer 1 was swapped before" in refused.err and "surgery revert" in refused.err


@pytest.mark.parametrize("drift", ["full", pytest.param("layerwise", marks=pytest.mark.slow)])
def test_another_rule_beside_the_first(bases, swap, surgery, tmp_path, write_recipe, drift):
    base = bases["mamba2"]
    first = swap(base, [1], "bayesian", name="first")
    recipe = write_recipe(f"model: {first}\nlayers: {{top: 2}}\nmemory: {{rule: palimpsa}}\ndata: bundled\n")
    out = tmp_path / "second"
    result = surgery("apply", recipe, "--output", out, "--drift", drift, "--json", "-")
    assert result.code == 0, result.err
    assert result.json["exact"] and 1 not in result.json["layers"] and len(result.json["layers"]) == 2
    config = json.loads((out / "config.json").read_text())
    found = config["surgery"]
    assert found["schema"] == 2 and found["layers"] == sorted([1, *result.json["layers"]])
    assert {one["rule"]: one["layers"] for one in found["swaps"]} == {
        "bayesian": [1], "palimpsa": result.json["layers"]
    }  # fmt: skip
    model = hosts.load_model(out)
    rules = {layer: mixer.memory.rule for layer, mixer in hosts.adapter_for(config).mixers(model).items()}
    assert rules[1] == "bayesian" and all(rules[layer] == "palimpsa" for layer in result.json["layers"])
    exported = surgery("export", out, "--output", tmp_path / "exported", "--json", "-")
    assert exported.code == 0, exported.err
    fewer = surgery("revert", tmp_path / "exported", "--output", tmp_path / "fewer", "--layers", "1", "--json", "-")
    assert fewer.code == 0, fewer.err
    left = json.loads((tmp_path / "fewer" / "config.json").read_text())["surgery"]
    assert left["schema"] == 1 and left["rule"] == "palimpsa" and left["layers"] == result.json["layers"]


def test_distilling_on_from_a_swapped_base(bases, swap, surgery, tmp_path, write_recipe):
    """The new layers are trained; the earlier ones are the teacher's as well, and keep their dose."""
    first = swap(bases["mamba2"], [1], "bayesian, start: paper", name="first")
    phase = "{kind: hidden, steps: 1, context: 16, batch: 16, learning_rate: 1.0e-3, dose: {from: 0, to: 1, over: 1}}"
    recipe = write_recipe(
        f"model: {first}\nlayers: [3]\nmemory: {{rule: palimpsa}}\ndata: bundled\nphases: [{phase}]\n"
    )
    result = surgery("distill", recipe, "--run", tmp_path / "run", "--no-evaluation", "--device", "cpu")
    assert result.code == 0, result.err
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert manifest["layers"] == [1, 3] and manifest["rule"] == "bayesian + palimpsa"
    assert manifest["exact"] is True
    back = surgery("revert", tmp_path / "run", "--output", tmp_path / "back", "--json", "-")
    assert back.code == 0 and back.json["identical"] is False, back.err
    assert all(name.startswith("backbone.layers.") for name in back.json["changed"])
    assert {name.split(".")[2] for name in back.json["changed"]} == {"3"}
    before, after = raw(first), raw(tmp_path / "run" / "phases" / "01-hidden" / "model")
    mine = [name for name in before if ".layers.1." in name]
    assert any(name.endswith("memory.dose") for name in mine) and all(after[name] == before[name] for name in mine)
    assert after["backbone.layers.3.mixer.memory.dose"] == before["backbone.layers.1.mixer.memory.dose"]  # both 1
