"""Hybrids with Gated DeltaNet mixers beyond the battery: training, saving, half precision, the command line."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hosts_battery import apart, raw_tensors
from hosts_case_hybrids_delta import CASES
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surgery import hosts
from surgery.adaptation.monitoring import Listener, read_metrics
from surgery.adaptation.phases import Options
from surgery.adaptation.run import distill
from surgery.cli import main
from surgery.data.tokens import Tokens
from surgery.errors import UsageError
from surgery.evaluation.perplexity import stream_losses, window_losses
from surgery.export import verify
from surgery.export.run import export
from surgery.export.source import open_source
from surgery.inspection.horizon import horizon
from surgery.inspection.measure import inspect_static
from surgery.operation import apply
from surgery.recipe import load_recipe

NAMES = ("qwen3_next-tied", "qwen3_5-multimodal", "qwen3_5_moe-text", "olmo_hybrid-plain", "kimi_linear-plain")

RENAMED = ("olmo_hybrid-plain", "kimi_linear-plain")  # transformers saves some tensors under other names


@pytest.fixture(params=[case for case in CASES if case.name in NAMES], ids=lambda case: case.name)
def one(request):
    return request.param


@pytest.fixture
def base(one, base_of):
    return base_of(one)


@pytest.fixture
def text_file(tmp_path):
    words = ["".join(random.choices("etaoinshrdlu", k=random.randint(1, 6))) for _ in range(40)]
    documents = [" ".join(random.choices(words, k=120)) + ".\n" for _ in range(8)]
    path = tmp_path / "text.txt"
    path.write_text("\x1e\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture
def recipe(base, one, tmp_path, text_file):
    def make(*phases, rule="bayesian", **sections):
        phases = [
            {"steps": 4, "context": 32, "batch": 128, "warmup": 1, "learning_rate": 3e-3, **phase} for phase in phases
        ]
        document = {
            "model": str(base), "layers": list(one.swapped), "memory": {"rule": rule}, "data": str(text_file),
            "phases": phases, "evaluation": {"text": str(text_file), "recall": {"lengths": [256]}}, **sections,
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(document), encoding="utf-8")
        return load_recipe(path)

    return make


class Stopped(Exception):
    pass


def test_distilled_resumed_and_exported(one, base, recipe, tmp_path, monkeypatch):
    """What is trained is written under its disk names; everything else keeps its bytes, read by the model or not."""

    def stop(step, steps):
        if step.step == 3:
            raise Stopped

    made = recipe({"kind": "hidden", "trainable": "swapped"}, {"kind": "logits", "trainable": "swapped"})
    run = tmp_path / "run"
    with pytest.raises(Stopped):
        distill(made, run, options=Options(save_every=2, watchers=lambda title: [Listener(stop)]), evaluate=False)
    result = distill(made, run, options=Options(save_every=2), evaluate=False)
    rows = read_metrics(run / "phases" / "01-hidden" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[-1]["dose"] == 1.0
    adapter = hosts.adapter_for(hosts.read_config(base))
    config = hosts.read_config(result["model"])
    prefixes = tuple(adapter.tensor_prefix(config, layer) for layer in one.swapped)
    before, after = raw_tensors(run / "applied"), raw_tensors(run / "phases" / "02-logits" / "model")
    changed = {name for name in before if after[name] != before[name]}
    assert before.keys() == after.keys() and len(changed) > 15 * len(one.swapped) - 15
    assert all(name.startswith(prefixes) for name in changed)
    model = hosts.load_model(result["model"])
    applied = hosts.load_model(run / "applied", dtype=torch.float32)
    ids = torch.randint(3, 256, (1, 40))
    with torch.no_grad():
        assert apart(model(ids).logits, applied(ids).logits) > 1e-3

    def reload_here(directory, given, code):
        return verify.model_logits(AutoModelForCausalLM.from_pretrained(directory), given)

    monkeypatch.setattr(verify, "reload_logits", reload_here)
    export(str(run), tmp_path / "half", dtype="bfloat16")  # checks that it loads as the run in that dtype does
    export(str(run), tmp_path / "exported", dtype="float32")
    exported = raw_tensors(tmp_path / "exported")
    assert before.keys() - exported.keys() <= adapter.ties(config).keys()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    greedy = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(plain.generate(ids, **greedy), model.generate(ids, **greedy))


def test_an_upgraded_model_saved_by_transformers(base, recipe, tmp_path):
    """A user's own training ends in save_pretrained: the host's layout again, to be loaded by either and exported."""
    apply(recipe(), tmp_path / "out", drift="skip")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "own")
    before, after = raw_tensors(tmp_path / "out"), raw_tensors(tmp_path / "own")
    adapter, config = hosts.adapter_for(hosts.read_config(base)), hosts.read_config(tmp_path / "out")
    lost = {name for name in before.keys() - after.keys() if not adapter.is_unused(name)}
    assert after.keys() <= before.keys() and lost <= adapter.ties(config).keys()
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "own"),
        hosts.load_model(tmp_path / "own", dtype=torch.float32),
    ):
        mine, theirs = again.state_dict(), model.state_dict()
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert open_source(str(tmp_path / "own")).doses


def published(name, layers):
    """The names of published checkpoints where transformers' save_pretrained has others."""
    layer = int(name.split(".")[2]) if name.startswith("model.layers.") else None
    if layer is not None and layer not in layers:
        name = name.replace("feedforward_layer_norm", "post_attention_layernorm")
    return re.sub(r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1", name)


def train_everything(base, recipe, run):
    made = recipe({"kind": "next-token", "trainable": "all", "steps": 2}, model=str(base))
    model = Path(distill(made, run, evaluate=False)["model"])
    before, after = raw_tensors(run / "applied"), raw_tensors(model)
    changed = {name for name in before if after[name] != before[name]}
    unread = {name for name in before if hosts.adapter_for(hosts.read_config(model)).is_unused(name)}
    assert before.keys() == after.keys() and not changed & unread
    assert len(changed) > 0.9 * len(before.keys() - unread)
    written, given = (json.loads((path / "config.json").read_text()) for path in (model, run / "applied"))
    assert written.keys() <= {*given, "dtype"} and written["surgery"] == given["surgery"]


def test_everything_can_be_trained(base, recipe, tmp_path):
    """Norms, MLPs and stacked experts too, each in its place on disk."""
    train_everything(base, recipe, tmp_path / "run")


@pytest.mark.parametrize("one", [case for case in CASES if case.name in RENAMED], indirect=True)
def test_everything_can_be_trained_under_published_names(one, base, recipe, tmp_path):
    own = shutil.copytree(base, tmp_path / "published")
    tensors = load_file(base / "model.safetensors")
    renamed = {published(name, one.layers): tensor for name, tensor in tensors.items()}
    assert len(renamed) == len(tensors) and renamed.keys() != tensors.keys()
    save_file(renamed, own / "model.safetensors", metadata={"format": "pt"})
    train_everything(own, recipe, tmp_path / "run")


def test_reading_with_a_carried_cache_equals_one_window(recipe, tmp_path):
    apply(recipe(rule="palimpsa"), tmp_path / "out", drift="skip")
    model = hosts.load_model(tmp_path / "out", dtype=torch.float32)
    for memory in (mixer.memory for mixer in hosts.adapter_for(model.config.to_dict()).mixers(model).values()):
        memory.dose.fill_(1.0)
    tokens = Tokens(torch.randint(3, 256, (96,)), torch.arange(1, 97), "random")
    whole = window_losses(model, tokens, 96).nll
    assert apart(stream_losses(model, tokens, segment=17).nll, whole) < 1e-5
    assert apart(stream_losses(model, tokens, segment=1).nll, whole) < 1e-5


def test_gradient_checkpointing_changes_no_gradient(base):
    ids = torch.randint(3, 256, (2, 30))
    reset = torch.zeros_like(ids, dtype=torch.bool)
    reset[:, [0, 13]] = True
    gradients = []
    for checkpointing in (False, True):
        model = hosts.load_model(base, dtype=torch.float32).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.model(input_ids=ids, reset=reset).last_hidden_state.square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    plain, replayed = gradients
    assert plain.keys() == replayed.keys()
    assert all(apart(replayed[name], plain[name]) < 1e-5 for name in plain)


def test_half_precision_leaves_decays_and_memories_in_float32(one, recipe, tmp_path):
    apply(recipe(rule="palimpsa"), tmp_path / "out", drift="skip")
    loaded = hosts.load_model(tmp_path / "out", dtype=torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    stored = raw_tensors(tmp_path / "out")
    adapter = hosts.adapter_for(hosts.read_config(tmp_path / "out"))
    config = hosts.read_config(tmp_path / "out")
    for model in (loaded, plain):
        for layer, mixer in adapter.mixers(model).items():
            prefix = adapter.tensor_prefix(config, layer)
            kept = ["A_log", "dt_bias"]
            kept += ["memory.dose", "memory.b_scale", "memory.Ip_log"] if layer in one.swapped else []
            for name in kept:
                tensor = mixer.get_parameter(name) if name in kept[:2] else mixer.state_dict()[name]
                assert tensor.dtype == torch.float32
                assert tensor.detach().flatten().view(torch.uint8).numpy().tobytes() == stored[prefix + name][2]
            assert mixer._project(torch.zeros(1, 1, mixer.geometry.hidden_size, dtype=torch.bfloat16))
        with torch.no_grad():
            assert model(torch.randint(3, 256, (1, 20))).logits.isfinite().all()


def test_generation_pads_on_the_left(recipe, tmp_path):
    apply(recipe(), tmp_path / "out", drift="skip")
    model = hosts.load_model(tmp_path / "out", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    short, long = torch.randint(3, 256, (1, 7)), torch.randint(3, 256, (1, 12))
    ids = torch.cat([torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1), long])
    mask = (torch.arange(12) >= torch.tensor([[5], [0]])).long()
    greedy = {"max_new_tokens": 6, "do_sample": False}
    together = model.generate(ids, attention_mask=mask, **greedy)[:, 12:]
    for row, alone in zip(together, (short, long), strict=True):
        assert torch.equal(row, model.generate(alone, **greedy)[0, alone.shape[1] :])
    beams = model.generate(ids, attention_mask=mask, num_beams=3, **greedy)[:, 12:]
    for row, alone in zip(beams, (short, long), strict=True):
        expected = model.generate(alone, num_beams=3, use_cache=False, **greedy)[0, alone.shape[1] :]
        assert torch.equal(row, expected)


@pytest.mark.parametrize("one", [case for case in CASES if case.name == "qwen3_next-tied"], indirect=True)
def test_attention_and_experts_run_as_upstreams_do(one, base):
    """Asked in a process of its own, where nothing has been remembered of upstream's class."""
    code = (
        "import sys, torch; from surgery import hosts; torch.set_num_threads(1); "
        "c = hosts.load_model(sys.argv[1]).config; print(c._attn_implementation, c._experts_implementation)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(base)], capture_output=True, text=True, check=True)
    config = one.upstream(base).config
    assert done.stdout.split() == [config._attn_implementation, str(config._experts_implementation)]


def test_a_fresh_model_starts_as_upstream_does(base):
    """Decays in upstream's range, nothing left at zero or uninitialised."""
    config = hosts.read_config(base)
    model = hosts.adapter_for(config).build(config)
    for mixer in hosts.adapter_for(config).mixers(model).values():
        rate = mixer.A_log.detach().exp()
        assert rate.min() > 0 and rate.max() <= 16 and rate.std() > 0
        assert all(parameter.abs().sum() > 0 for parameter in mixer.parameters())


def test_the_static_estimate_is_the_gate_at_rest(base):
    """N at a projection of 0, from A_log and dt_bias alone; where each key channel has its own, the mean over them."""
    figures = inspect_static(base).figures
    mixers = hosts.adapter_for(hosts.read_config(base)).mixers(hosts.load_model(base, dtype=torch.float32))
    for figure, (layer, mixer) in zip(figures, mixers.items(), strict=True):
        with torch.no_grad():
            decay = mixer._log_decay(torch.zeros_like(mixer.dt_bias)).reshape(mixer.geometry.num_heads, -1)
        assert figure.layer == layer and figure.tokens is None
        torch.testing.assert_close(torch.tensor(figure.heads).double(), horizon(decay).mean(-1), rtol=1e-5, atol=0)


def test_convolutions_cut_in_thirds_are_refused(tmp_path):
    """transformers' save_pretrained cuts Olmo Hybrid's joint convolution into equal parts, whatever q, k and v are."""
    case = next(case for case in CASES if case.name == "olmo_hybrid-plain")
    case.write(tmp_path)
    case.upstream(tmp_path).save_pretrained(tmp_path / "again")
    with pytest.raises(UsageError, match=r"q_conv1d\.weight has 27 rows, its projection 16.*equal thirds"):
        hosts.load_model(tmp_path / "again")


def test_published_configurations_are_read():
    """Kimi Linear counts its layers from 1, beside its mixers' shapes; Qwen3.5 may tie its head at the top alone."""
    kimi = {
        "model_type": "kimi_linear", "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
        "num_hidden_layers": 5, "hidden_size": 32, "rope_scaling": None, "num_experts": 4,
        "linear_attn_config": {
            "full_attn_layers": [3, 5], "kda_layers": [1, 2, 4], "head_dim": 24, "num_heads": 6,
            "short_conv_kernel_size": 3,
        },
    }  # fmt: skip
    adapter = hosts.adapter_for(kimi)
    upgraded = adapter.surgery_config(kimi, {"schema": 1, "rule": "host", "layers": [3], "options": {}})
    for config in (kimi, upgraded):
        assert adapter.mixer_layers(config) == [0, 1, 3]
        shapes = adapter.expected_tensors(config)
        assert shapes["model.layers.3.self_attn.k_conv1d.weight"] == (144, 1, 3)
        assert shapes["model.layers.3.self_attn.A_log"] == (1, 1, 6, 1)
    assert "auto_map" not in upgraded and adapter.base_config(upgraded) == kimi
    text = {"model_type": "qwen3_5_text", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    qwen = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text, "vision_config": {"depth": 1}}
    adapter = hosts.adapter_for(qwen)
    assert adapter.ties(qwen) == {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    assert not adapter.ties({**qwen, "text_config": {**text, "tie_word_embeddings": False}})
    assert adapter.tensor_prefix(qwen, 2) == "model.language_model.layers.2.linear_attn."


# the command line


@pytest.mark.parametrize("one", [case for case in CASES if case.name == "qwen3_5-multimodal"], indirect=True)
def test_the_command_line_end_to_end(one, recipe, base, tmp_path, capsys, monkeypatch):
    path = str(recipe({"kind": "hidden", "trainable": "swapped"}, rule="palimpsa").path)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["surgery", *map(str, arguments)])
        try:
            main()
        except SystemExit as ended:
            assert not ended.code, capsys.readouterr().err
        return capsys.readouterr().out

    text = tmp_path / "text.txt"
    found = json.loads(run("inspect", base, "--tokens", "500", "--text", text, "--json", "-"))
    assert sorted(layer["layer"] for layer in found["layers"]) == list(one.layers)
    run("inspect", base, "--static")
    run("validate", path)
    run("apply", path, "--output", tmp_path / "applied")
    assert "nats" in (tmp_path / "applied" / "README.md").read_text()
    run("distill", path, "--run", tmp_path / "run", "--no-evaluation")
    run("eval", tmp_path / "run", "--text", text, "--tokens", "500", "--recall-lengths", "none")
    run("export", tmp_path / "run", "--output", tmp_path / "exported", "--dtype", "float32")
    kept = raw_tensors(base)
    vision = {name for name in kept if name.startswith(("model.visual.", "mtp."))}
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert len(vision) > 15 and vision <= exported.keys()
    assert all(exported[name].flatten().view(torch.uint8).numpy().tobytes() == kept[name][2] for name in vision)
