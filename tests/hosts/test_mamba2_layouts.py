"""What only mamba_ssm's and flash-linear-attention's Mamba-2 mixers vary, against their arithmetic written out token by
token in float64; and how the three layouts are told apart."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from hosts_battery import apart, scatter, write_layout
from safetensors.torch import load_file

from surgery import hosts
from surgery.errors import UsageError

FLA = {
    "model_type": "mamba2", "head_dim": 8, "hidden_size": 16, "state_size": 4, "expand": 2, "n_groups": 2,
    "num_hidden_layers": 2, "norm_eps": 1e-5, "vocab_size": 40, "residual_in_fp32": True,
}  # fmt: skip
SSM = {
    "d_model": 16, "n_layer": 2, "vocab_size": 37, "rms_norm": True, "residual_in_fp32": True,
    "pad_vocab_size_multiple": 8, "tie_embeddings": False,
    "ssm_cfg": {"layer": "Mamba2", "d_state": 4, "headdim": 8, "ngroups": 2},
}  # fmt: skip


def mixer(x, read, *, heads, groups, memory, before_gate=False):
    """One mixer on [T, D] float64; ``memory`` is the width of what passes through the recurrence."""
    p = memory // heads
    inner = read("out_proj.weight").shape[1]
    n = (read("conv1d.weight").shape[0] - memory) // (2 * groups)
    sizes = [inner - memory, inner - memory, memory, memory + 2 * groups * n, heads]
    z0, x0, z, xbc, dt = (x @ read("in_proj.weight").T).split(sizes, dim=-1)
    weight = read("conv1d.weight")
    xbc = F.conv1d(F.pad(xbc.T, (weight.shape[-1] - 1, 0)), weight, read("conv1d.bias"), groups=weight.shape[0]).T
    u, b, c = F.silu(xbc).split([memory, groups * n, groups * n], dim=-1)
    u = u.unflatten(-1, (heads, p))
    b, c = (part.unflatten(-1, (groups, n)).repeat_interleave(heads // groups, dim=1) for part in (b, c))
    dt = F.softplus(dt + read("dt_bias"))
    a = (-read("A_log").exp() * dt).exp()
    state = torch.zeros(heads, p, n, dtype=x.dtype)
    rows = []
    for t in range(len(x)):
        state = a[t, :, None, None] * state + dt[t, :, None, None] * u[t, :, :, None] * b[t, :, None, :]
        rows.append((state * c[t, :, None, :]).sum(-1))
    skip = read("D")
    y = torch.stack(rows) + u * (skip.view(heads, p) if len(skip) > heads else skip[:, None])
    y, gate = y.flatten(1), F.silu(z)
    norm = read("norm.weight")
    if norm is None:
        y = y * gate
    else:
        y = (y if before_gate else y * gate).unflatten(-1, (groups, -1))
        y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * norm
        y = y * gate if before_gate else y
    return torch.cat([F.silu(z0) * x0, y], dim=-1) @ read("out_proj.weight").T


@pytest.fixture
def checkpoint(tmp_path):
    """Factory: a directory with random weights of a configuration, and its config as the tools read it."""

    def make(config):
        model = scatter(hosts.adapter_for(config).build(config))
        write_layout(tmp_path / "base", config, model.state_dict())
        return tmp_path / "base"

    return make


@pytest.mark.parametrize(("config", "memory", "before_gate"), [
    (FLA | {"rmsnorm": True, "D_has_hdim": True}, 32, False),
    (FLA | {"rmsnorm": False}, 32, False),
    (FLA | {"rmsnorm": True, "norm_before_gate": True}, 32, True),
    (SSM, 32, False),
    (SSM | {"ssm_cfg": SSM["ssm_cfg"] | {"d_ssm": 16, "D_has_hdim": True}}, 16, False),
    (SSM | {"ssm_cfg": SSM["ssm_cfg"] | {"d_ssm": 16, "rmsnorm": False, "norm_before_gate": True}}, 16, False),
])  # fmt: skip
def test_mixers_compute_what_is_written_out(checkpoint, config, memory, before_gate):
    directory = checkpoint(config)
    tensors = load_file(directory / "model.safetensors")
    model = hosts.load_model(directory)
    adapter = hosts.adapter_for(hosts.read_config(directory))
    x = torch.randn(2, 19, 16)

    for layer, graft in adapter.mixers(model).items():

        def read(name, layer=layer):
            tensor = tensors.get(f"backbone.layers.{layer}.mixer.{name}")
            return None if tensor is None else tensor.double()

        heads = memory // 8
        expected = torch.stack(
            [mixer(row.double(), read, heads=heads, groups=2, memory=memory, before_gate=before_gate) for row in x]
        )
        with torch.no_grad():
            assert apart(graft(x), expected) < 1e-6


def test_shapes_are_taken_from_the_tensors(checkpoint):
    """What a configuration leaves to its library's defaults, its tensors decide."""
    explicit = SSM | {"ssm_cfg": {"layer": "Mamba2", "d_state": 6, "headdim": 4, "d_conv": 3, "d_ssm": 16, "expand": 3,
                                  "D_has_hdim": True, "rmsnorm": False, "conv_bias": False, "bias": True}}  # fmt: skip
    directory = checkpoint(explicit)
    bare = {"ssm_cfg": {"layer": "Mamba2"}, "tie_embeddings": False, "vocab_size": 33}
    (directory / "config.json").write_text(json.dumps(bare))
    found = hosts.read_config(directory)
    assert found["ssm_cfg"] == explicit["ssm_cfg"]
    assert (found["d_model"], found["n_layer"], found["vocab_size"]) == (16, 2, 33)
    assert hosts.open_model(directory).config == found
    assert hosts.adapter_for(found).parse(found).vocab_size == 40  # padded to a multiple of 8, the library's default
    (directory / "config.json").write_text(json.dumps(bare | {"vocab_size": 30, "pad_vocab_size_multiple": 1}))
    with torch.no_grad():
        assert hosts.load_model(directory)(torch.arange(9)[None]).logits.shape == (1, 9, 40)


@pytest.mark.parametrize(("change", "message"), [
    ({"ssm_cfg": {}}, "ssm_cfg.layer: 'Mamba1'"),
    ({"attn_layer_idx": [1]}, r"attn_layer_idx: layers \[1\]"),
    ({"d_intermediate": 64}, "d_intermediate"),
    ({"rms_norm": False}, "rms_norm"),
    ({"ssm_cfg": SSM["ssm_cfg"] | {"d_ssm": 12}}, "headdim"),
    ({"ssm_cfg": SSM["ssm_cfg"] | {"d_ssm": 64}}, "d_ssm"),
    ({"ssm_cfg": SSM["ssm_cfg"] | {"ngroups": 3}}, "ngroups"),
    ({"ssm_cfg": SSM["ssm_cfg"] | {"dt_limit": [0.3, 0.1]}}, "dt_limit"),
])  # fmt: skip
def test_mamba_ssm_refuses_with_the_key(change, message):
    config = SSM | change
    with pytest.raises(UsageError, match=message):
        hosts.adapter_for(config).parse(config)


@pytest.mark.parametrize(("change", "message"), [
    ({"head_dim": 12}, "head_dim"),
    ({"n_groups": 3}, "n_groups"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"dt_limit": [0.3, 0.1]}, "dt_limit"),
])  # fmt: skip
def test_fla_refuses_with_the_key(change, message):
    config = FLA | change
    with pytest.raises(UsageError, match=message):
        hosts.adapter_for(config).parse(config)


def test_layouts_are_told_apart_by_their_keys():
    transformers = {"model_type": "mamba2", "num_heads": 4, "layer_norm_epsilon": 1e-5, "norm_before_gate": True}
    assert hosts.adapter_for(transformers).name == "mamba2"
    for key in ("norm_eps", "dt_limit", "rmsnorm", "D_has_hdim", "fuse_norm"):
        assert hosts.adapter_for(transformers | {key: FLA.get(key, [0.0, 1.0])}).name == "fla_mamba2"
    assert hosts.adapter_for(SSM).name == "mamba_ssm"
    for config in (FLA, SSM):
        adapter = hosts.adapter_for(config)
        swap = {"schema": 1, "rule": "palimpsa", "layers": [1], "options": {}, "base": "tiny"}
        written = adapter.surgery_config(config, swap)
        assert written["model_type"] == f"surgery_{adapter.name}" and hosts.adapter_for(written) is adapter
        assert adapter.base_config(written) == config
        again = adapter.surgery_config(written, swap | {"layers": [0, 1]})
        assert adapter.base_config(again) == config


def test_a_configuration_of_both_libraries_is_the_later_ones():
    """flash-linear-attention keeps transformers' keys of a file that it loaded and saves its own beside them."""
    config = FLA | {"layer_norm_epsilon": 0.5, "time_step_limit": [0.0, 0.1], "num_heads": 99, "norm_eps": 2e-5}
    parsed = hosts.adapter_for(config).parse(config)
    assert (parsed.layer_norm_epsilon, parsed.time_step_limit, parsed.num_heads) == (2e-5, (0.0, float("inf")), 4)


def test_static_decay_is_clamped_by_each_librarys_key(checkpoint):
    for config, limit in ((FLA, {"dt_limit": [0.0, 0.2]}), (SSM, {"ssm_cfg": SSM["ssm_cfg"] | {"dt_limit": [0, 0.2]}})):
        adapter = hosts.adapter_for(config)
        tensors = scatter(adapter.build(config)).state_dict()
        estimate = adapter.static_log_decay(tensors, config | limit)
        for layer, decay in estimate.items():
            a = tensors[f"backbone.layers.{layer}.mixer.A_log"].exp()
            assert (decay / -a <= 0.2 + 1e-6).all()
            assert (adapter.static_log_decay(tensors, config)[layer] / -a > 0.2).any()


def test_fla_rounds_its_residual_stream():
    """In half precision, the sum after each block takes the norm's dtype; transformers keeps it in float32."""
    for config, dtype in ((FLA, torch.bfloat16), (SSM, torch.float32)):
        adapter = hosts.adapter_for(config)
        model = adapter.build(config).to(torch.bfloat16)
        seen = []
        adapter.blocks(model)[1].register_forward_hook(lambda _, args, out, seen=seen: seen.append(out.dtype))
        model(torch.arange(5)[None])
        assert seen == [dtype]
