"""Adapters: what they say of a checkpoint agrees with its files, and what they refuse they name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from surgery import hosts
from surgery.checkpoint.reading import open_checkpoint
from surgery.errors import JobError, UsageError
from surgery.memory import create
from surgery.opening import check_names


@pytest.fixture
def config(base):
    return hosts.read_config(base)


@pytest.fixture
def adapter(config):
    return hosts.adapter_for(config)


@pytest.fixture
def copied(base, tmp_path):
    """A base checkpoint that a test may spoil."""
    return shutil.copytree(base, tmp_path / "copied")


def rewrite(path, change):
    """Apply ``change`` to the tensors of a checkpoint."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_expected_tensors_are_those_on_disk(adapter, config, base):
    with safe_open(base / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert adapter.expected_tensors(config) == shapes


def test_mixer_tensors_stand_under_their_prefix(adapter, config):
    names = adapter.expected_tensors(config)
    assert adapter.mixer_layers(config) == [0, 1, 2]
    for layer in adapter.mixer_layers(config):
        assert adapter.tensor_prefix(config, layer) + "A_log" in names


def test_expected_tensors_of_an_upgraded_model(adapter, config):
    swap = {"schema": 1, "rule": "palimpsa", "layers": [1], "options": {}, "base": "tiny"}
    written = adapter.surgery_config(config, swap)
    memory = create("palimpsa", adapter.geometry(config, 1))
    prefix = adapter.tensor_prefix(config, 1)
    added = {f"{prefix}memory.{name}": tuple(t.shape) for name, t in memory.state_dict().items()}
    assert adapter.expected_tensors(written) == adapter.expected_tensors(config) | added
    assert hosts.adapter_for(written) is adapter


def test_geometry_fits_the_mixer(adapter, config, base, text):
    model = hosts.load_model(base)
    for layer, mixer in adapter.mixers(model).items():
        geometry = adapter.geometry(config, layer)
        inputs = mixer.inputs(torch.randn(1, 3, geometry.hidden_size))
        assert inputs.k.shape == (1, 3, geometry.num_key_heads, geometry.key_dim)
        assert inputs.v.shape == (1, 3, geometry.num_heads, geometry.value_dim)
    with torch.no_grad():
        hidden = adapter.backbone(model)(text).last_hidden_state
        torch.testing.assert_close(adapter.head(model)(hidden) * adapter.logit_scale(config), model(text).logits)
        seen = []
        adapter.blocks(model)[1].register_forward_hook(lambda block, args, out: seen.append((args[0], out)))
        model(text)
    assert [tensor.shape for tensor in seen[0]] == [(2, 37, 32)] * 2


def test_surgery_config_keeps_the_base_and_is_strict(adapter, config):
    given = config | {"time_step_limit": [0.0, float("inf")], "unknown": 3, "auto_map": {"AutoConfig": "x.Y"}}
    written = adapter.surgery_config(given, {"schema": 1})
    text = json.dumps(written, allow_nan=False)
    assert json.loads(text)["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert written["model_type"] == f"surgery_{adapter.name}" and written["unknown"] == 3
    assert "auto_map" not in written
    assert config["model_type"] == adapter.name


def test_static_decay_is_the_gate_at_zero_input(adapter, config, base):
    model = hosts.load_model(base)
    estimate = adapter.static_log_decay(load_file(base / "model.safetensors"), config)
    for layer, mixer in adapter.mixers(model).items():
        torch.testing.assert_close(estimate[layer], mixer.inputs(torch.zeros(1, 1, 32)).log_decay[0, 0])


def test_static_decay_is_clamped(bases):
    config = hosts.read_config(bases["mamba2"]) | {"time_step_limit": [0.0, 0.25]}
    tensors = load_file(bases["mamba2"] / "model.safetensors")
    estimate = hosts.adapter_for(config).static_log_decay(tensors, config)
    for layer, decay in estimate.items():
        a = tensors[f"backbone.layers.{layer}.mixer.A_log"].exp()
        assert (decay / -a <= 0.25 + 1e-6).all()


def test_missing_and_unexpected_tensors_are_fatal(adapter, config, copied):
    name = adapter.tensor_prefix(config, 1) + "A_log"
    rewrite(copied, lambda tensors: tensors.pop(name))
    with pytest.raises(JobError, match=f"missing tensors: {name}"):
        hosts.load_model(copied)


def test_unexpected_tensors_are_fatal(adapter, config, copied):
    name = adapter.tensor_prefix(config, 1) + "memory.b_scale"
    rewrite(copied, lambda tensors: tensors.update({name: torch.zeros(4)}))
    with pytest.raises(JobError, match=f"unexpected tensors: {name}"):
        hosts.load_model(copied)


def test_a_tensor_that_nothing_reads_is_known(bases, tmp_path):
    """Early Gated DeltaNet checkpoints carry `attn.D`, which is no reason to refuse them."""
    adapter = hosts.adapter_for(hosts.read_config(bases["gated_deltanet"]))
    assert adapter.is_unused("model.layers.3.attn.D")
    assert not adapter.is_unused("model.layers.3.attn.D_proj.weight") and not adapter.is_unused("model.layers.3.mlp.D")
    assert not hosts.adapter_for(hosts.read_config(bases["mamba2"])).is_unused("backbone.layers.3.mixer.D")
    copied = tmp_path / "with-D"
    shutil.copytree(bases["gated_deltanet"], copied)
    rewrite(copied, lambda tensors: tensors.update({"model.layers.1.attn.D": torch.zeros(4)}))
    text = torch.arange(20)[None]
    with torch.no_grad():
        expected, found = (hosts.load_model(path)(text).logits for path in (bases["gated_deltanet"], copied))
    assert torch.equal(expected, found)


def test_a_wrong_shape_is_fatal(adapter, config, copied):
    name = adapter.tensor_prefix(config, 2) + "dt_bias"
    rewrite(copied, lambda tensors: tensors.update({name: torch.zeros(7)}))
    with pytest.raises(JobError, match=rf"wrong shapes: {name} \[7\], not \[4\]"):
        hosts.load_model(copied)


def test_a_truncated_file_is_one_short_message(copied):
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(JobError) as caught:
        hosts.load_model(copied)
    assert str(copied) in str(caught.value) and len(str(caught.value).splitlines()) <= 5


def test_weights_that_are_no_safetensors(copied):
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(JobError, match="safetensors"):
        hosts.load_model(copied)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama"}, "'llama': unsupported architecture"),
        ({"model_type": "mamba"}, "Mamba-1"),
        ({}, "no model_type"),
    ],
)
def test_other_families_are_refused_with_the_list(config, message):
    with pytest.raises(UsageError, match=message) as caught:
        hosts.adapter_for(config)
    listed = str(caught.value).partition("supported: ")[2]
    assert all(adapter.title in listed and (adapter.model_types[0] or "") in listed for adapter in hosts.ADAPTERS)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mamba2", {"ssm_cfg": {}}, "mamba_ssm"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act"),
        ("mamba2", {"n_groups": 3}, "n_groups"),
        ("mamba2", {"expand": 3}, "hidden_size"),
        ("mamba2", {"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
        ("mamba2", {"time_step_limit": [0.5]}, "time_step_limit"),
        ("mamba2", {"surgery": "x"}, "surgery: 'x' is no mapping"),
        ("mamba2", {"num_heads": "many"}, "num_heads"),
        ("gated_deltanet", {"attn": {"layers": [3], "num_heads": 2}}, r"attn.layers: \[3\] are not indices"),
        ("gated_deltanet", {"attn": {"layers": [1], "num_heads": 5}}, "5 heads"),
        ("gated_deltanet", {"attn": [{"layers": [1], "num_heads": 2}] * 2}, "twice"),
        ("gated_deltanet", {"attn": {"num_heads": 2}}, "attn.layers"),
        ("gated_deltanet", {"attnres_block_size": 2}, "attention residuals"),
        ("gated_deltanet", {"hidden_act": "powlu"}, "hidden_act"),
        ("gated_deltanet", {"num_v_heads": 3}, "num_v_heads"),
        ("gated_deltanet", {"expand_v": 1.3}, "expand_v"),
        ("gated_deltanet", {"output_gate_activation": "gelu"}, "output_gate_activation"),
    ],
)
def test_what_cannot_be_run_is_refused(bases, name, change, message):
    config = hosts.read_config(bases[name]) | change
    with pytest.raises(UsageError, match=message):
        hosts.adapter_for(config).parse(config)


QUANTISED = {
    "bitsandbytes 4-bit": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, "4 bits"),
    "bitsandbytes 8-bit": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8 bits"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq, 4 bits"),
    "awq": ({"quant_method": "awq", "bits": 4}, "awq, 4 bits"),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    "nested": ({"quant_method": "fp8"}, "fp8"),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_bases_are_refused_in_one_line(adapter, config, kind):
    given, word = QUANTISED[kind]
    nested = {"text_config": {"quantization_config": given}}
    changed = config | (nested if kind == "nested" else {"quantization_config": given})
    with pytest.raises(UsageError, match="unquantised") as caught:
        hosts.adapter_for(changed)
    assert word in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert hosts.adapter_for(config | {"quantization_config": None}) is adapter


@pytest.mark.parametrize(("dtype", "suffix"), [
    (torch.int8, ""), (torch.uint8, ""), (torch.float8_e4m3fn, ""), (torch.int32, ".qweight"),
])  # fmt: skip
def test_tensors_of_few_bits_are_refused_wherever_a_checkpoint_is_opened(adapter, config, copied, dtype, suffix):
    """Whatever the configuration says, or does not."""
    ends = ("out_proj.weight", "o_proj.weight")
    name = next(name for name in adapter.expected_tensors(config) if name.endswith(ends))

    def change(tensors):
        whole = tensors.pop(name)
        tensors[name.removesuffix(".weight") + suffix if suffix else name] = whole.clamp(-1, 1).to(dtype)

    rewrite(copied, change)
    for opened in (open_checkpoint, hosts.load_model):
        with pytest.raises(UsageError, match="unquantised") as caught:
            opened(copied)
        assert len(str(caught.value).splitlines()) == 1 and name.removesuffix(".weight") in str(caught.value)


def test_a_key_of_early_transformers_is_no_other_library(bases):
    config = hosts.read_config(bases["mamba2"]) | {"norm_before_gate": True, "rms_norm": True}
    assert hosts.adapter_for(config).parse(config).num_heads == 4


def test_upstream_of_an_upgraded_or_foreign_model(bases, tmp_path):
    config = hosts.read_config(bases["mamba2"])
    adapter = hosts.adapter_for(config)
    (tmp_path / "config.json").write_text(json.dumps(adapter.surgery_config(config, {})))
    with pytest.raises(UsageError, match="no upstream"):
        hosts.load_model(tmp_path, implementation="upstream")


def test_missing_and_broken_configurations(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json: no such file"):
        hosts.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json:1: not JSON"):
        hosts.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="not a JSON object"):
        hosts.read_config(tmp_path)


def test_resolve(base, tmp_path, monkeypatch):
    assert hosts.resolve(str(base)) == base
    with pytest.raises(UsageError, match="no such bundled model"):
        hosts.resolve("bundled:nothing")
    with pytest.raises(UsageError, match="no such directory"):
        hosts.resolve("no/such/place/anywhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="a file"):
        hosts.resolve(str(tmp_path / "file"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="hub cannot be reached") as caught:
        hosts.resolve("some-owner/some-model", offline=True)
    assert len(str(caught.value).splitlines()) == 1


def test_resolve_finds_bundled_models(bases, tmp_path, monkeypatch):
    import surgery.bundled

    shutil.copytree(bases["mamba2"], tmp_path / "tiny")
    monkeypatch.setattr(surgery.bundled, "__file__", str(tmp_path / "__init__.py"))
    assert hosts.resolve("bundled:tiny") == tmp_path / "tiny"
    with pytest.raises(UsageError, match="there are: bundled:tiny"):
        hosts.resolve("bundled:huge")


def test_all_names_are_checked_from_the_headers(case, case_base, tmp_path):
    """Not of the mixers alone, which a swap touches: a model that cannot be loaded is not worth swapping."""

    def needed(name):
        mixers = tuple(adapter.tensor_prefix(config, layer) for layer in case.layers)
        either = [one for tie in adapter.ties(config).items() for one in tie]  # of two tied tensors one is enough
        return not adapter.is_unused(name) and name not in either and not name.startswith(mixers)

    adapter = hosts.adapter_for(hosts.read_config(case_base))
    config = open_checkpoint(case_base).config
    check_names(open_checkpoint(case_base), adapter)
    spoilt = shutil.copytree(case_base, tmp_path / "spoilt")
    used = [name for name in load_file(spoilt / "model.safetensors") if needed(name) and "visual" not in name]
    gone = used[torch.randint(len(used), ()).item()]
    rewrite(spoilt, lambda tensors: tensors.pop(gone))
    # of stacked experts the stack is too short, or transformers says that it cannot stack them
    with pytest.raises(UsageError, match=r"missing tensors|wrong shapes: .*experts|cannot be loaded: .*conversion"):
        check_names(open_checkpoint(spoilt), adapter)
    shutil.copy(case_base / "model.safetensors", spoilt)
    rewrite(spoilt, lambda tensors: tensors.update(strange=torch.ones(2)))
    with pytest.raises(UsageError, match="unexpected tensors: strange"):
        check_names(open_checkpoint(spoilt), adapter)
