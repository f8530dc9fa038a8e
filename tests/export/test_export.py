"""An exported directory: complete, loaded afresh bit for bit, and honest about itself."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from surgery.errors import JobError, UsageError
from surgery.export import verify
from surgery.export.run import export
from surgery.export.writing import plan_shards
from surgery.hosts import load_model


def weights_of(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(("family", "rule"), [("mamba2", "palimpsa"), ("gated_deltanet", "bayesian")])
def test_run_becomes_a_checkpoint(make_run, tmp_path, family, rule):
    run = make_run(family, rule)
    model = run / "phases" / "01-next-token" / "model"
    output = tmp_path / "out"
    done = export(str(run), output)
    assert done.check.bit_exact and not done.check.cast and done.check.kl == 0
    assert done.dtype == "float32"  # the recipe's
    config = json.loads((output / "config.json").read_text())
    assert config["model_type"] == f"surgery_{family}"
    assert config["surgery"]["layers"] == [0, 2]
    source = weights_of(model)
    written = weights_of(output)
    assert written.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(written[name], tensor), name
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (output / name).read_bytes() == (model / name).read_bytes()
    assert (output / "surgery_recipe.yaml").read_bytes() == (run / "recipe.yaml").read_bytes()
    assert json.loads((output / "generation_config.json").read_text()) == {
        "bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7
    }  # fmt: skip
    assert not list(tmp_path.glob(".out.partial*"))


@pytest.mark.parametrize(("family", "rule"), [("mamba2", "bayesian"), ("gated_deltanet", "palimpsa")])
def test_generation_with_and_without_cache(make_run, quick, tmp_path, family, rule):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "out"
    export(str(make_run(family, rule)), output)
    model = AutoModelForCausalLM.from_pretrained(output)
    assert type(model).__module__.startswith("surgery.models")
    inputs = AutoTokenizer.from_pretrained(output)("some text", return_tensors="pt")
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    cached, plain = (model.generate(**inputs, **options, use_cache=cache) for cache in (True, False))
    assert cached.shape == (1, 9 + 12)
    assert torch.equal(cached, plain)


def test_cast_states_its_drift_and_keeps_decays(make_run, tmp_path):
    run = make_run("mamba2", "palimpsa")
    output = tmp_path / "out"
    done = export(str(run), output, dtype="bfloat16")
    assert done.check.bit_exact and done.check.cast
    assert done.check.kl > 0 and done.check.max_logit_difference > 0
    assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
    kept = {name.rpartition(".")[2] for name, tensor in weights_of(output).items() if tensor.dtype == torch.float32}
    assert kept == {"A_log", "dt_bias", "dose", "b_scale", "Ip_log"}
    source = weights_of(run / "phases" / "01-next-token" / "model")
    for name, tensor in weights_of(output).items():
        assert torch.equal(tensor, source[name].to(tensor.dtype)), name
    # the figures are those of the two models on the text's first tokens
    ids = torch.randint(256, (1, 30))
    ours, theirs = load_model(run / "phases/01-next-token/model"), load_model(output)
    assert theirs.lm_head.weight.dtype == torch.bfloat16
    assert not torch.equal(ours(ids).logits, theirs(ids).logits)
    card = (output / "README.md").read_text()
    assert f"{done.check.kl:.3g} nats a token" in card
    assert f"by up to {done.check.max_logit_difference:.3g}" in card


def test_shards_and_index(make_run, quick, tmp_path):
    run = make_run()
    output = tmp_path / "out"
    done = export(str(run), output, shard_size=30_000)
    assert len(done.weights) > 2
    index = json.loads((output / "model.safetensors.index.json").read_text())
    for name in done.weights:
        with safe_open(output / name, framework="pt") as file:
            inside = list(file.keys())
        assert {key for key, shard in index["weight_map"].items() if shard == name} == set(inside)
        sizes = [tensor.numel() * tensor.itemsize for tensor in load_file(output / name).values()]
        assert sum(sizes) <= 30_000 or len(sizes) == 1
    total = sum(tensor.numel() * tensor.itemsize for tensor in weights_of(output).values())
    assert index["metadata"]["total_size"] == total


def test_shards_are_filled_in_order():
    sizes = {"a": 4, "b": 5, "c": 1, "d": 20, "e": 3}
    assert plan_shards(sizes, 10) == [["a", "b", "c"], ["d"], ["e"]]
    assert plan_shards(sizes, 100) == [list(sizes)]


def test_card_quotes_the_runs_evaluation_and_the_controls(make_run, quick, report, tmp_path):
    run = make_run(report=report())
    control = tmp_path / "control.json"
    control.write_text(json.dumps(report(before=None, after=19.5, name="trained host")))
    done = export(str(run), tmp_path / "out", control=str(control))
    assert not done.warnings
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| perplexity | 20.500 | 18.250 | 19.500 |" in card
    assert "| bits per byte | 2.0500 | 1.8250 | 1.9500 |" in card
    assert "| recall at 256 tokens | 0.60 (0.10 to 0.90) | 0.75 (0.10 to 0.90) | 0.75 (0.10 to 0.90) |" in card
    assert "0.8902 (95%: 0.8800 to 0.9100)" in card
    assert "The control is `trained host`, measured on the same text" in card
    assert "| next-token | next-token | 16 | 1024 | 5.5000 to 5.2500 | 1 |" in card
    assert "dose 1, the full rule" in card


def test_control_may_be_a_run(make_run, quick, report, tmp_path):
    run = make_run(report=report())
    control = make_run(rule="host", report=report(after=19.0, name="control run"), name="control")
    export(str(run), tmp_path / "out", control=str(control))
    assert "`control run`" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(UsageError, match="holds no evaluation"):
        export(str(run), tmp_path / "other", control=str(make_run(name="unmeasured")))


def test_reports_of_other_checkpoints_are_not_quoted(make_run, quick, report, tmp_path):
    run = make_run()
    (run / "evaluation").mkdir()
    (run / "evaluation" / "before.json").write_text(json.dumps(report(name="the base")))
    old = report(name="the swap alone") | {"checkpoint": "applied"}
    (run / "evaluation" / "applied.json").write_text(json.dumps(old))
    done = export(str(run), tmp_path / "out")
    assert done.report is None
    assert any("nothing was measured" in warning for warning in done.warnings)
    assert "Not measured" in (tmp_path / "out" / "README.md").read_text()


def test_dose_below_one_is_warned_of_and_stated(make_run, quick, tmp_path):
    done = export(str(make_run(dose=0.25)), tmp_path / "out")
    warning = "2 of 2 swapped layers are at dose 0.25, below the full rule's 1"
    assert warning in done.warnings
    assert warning in (tmp_path / "out" / "README.md").read_text()


def test_unfinished_run_exports_what_is_finished_and_says_so(make_run, quick, tmp_path):
    run = make_run(status="pending")
    done = export(str(run), tmp_path / "out")
    assert done.source.located.path == run / "applied"
    assert any("not finished: next-token" in warning for warning in done.warnings)
    assert "this is the swap alone" in (tmp_path / "out" / "README.md").read_text()


def test_overrides_are_named(make_run, quick, tmp_path):
    export(str(make_run(overrides=["export.dtype=bfloat16"])), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert "Changed on the command line: `export.dtype=bfloat16`" in (tmp_path / "out" / "README.md").read_text()


def test_control_rule_exports_without_a_dose(make_run, quick, tmp_path):
    done = export(str(make_run(rule="host")), tmp_path / "out")
    assert done.source.doses == {}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "the control" in card and "Dose" not in card


def test_swapped_directory_without_a_recipe(make_checkpoint, quick, tmp_path):
    """Its own dtype, a warning, and no recipe file."""
    source = make_checkpoint("mamba2", "palimpsa", dtype=torch.bfloat16)
    done = export(str(source), tmp_path / "out")
    assert done.dtype == "bfloat16" and not done.check.cast
    assert any("no recipe" in warning for warning in done.warnings)
    assert not (tmp_path / "out" / "surgery_recipe.yaml").exists()


def test_measuring_at_export(make_run, quick, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.export.run.EVALUATED_TOKENS", 600)
    monkeypatch.setattr("surgery.export.run.RecallPlan", lambda lengths, samples: None)
    run = make_run()
    done = export(str(run), tmp_path / "out", measure=True)
    assert done.report["text"]["tokens"] <= 600
    perplexity = done.report["model"]["perplexity"]
    assert perplexity != done.report["baseline"]["perplexity"]
    assert f"{perplexity:.3f}" in (tmp_path / "out" / "README.md").read_text()


def nothing_left(tmp_path):
    return not (tmp_path / "out").exists() and not list(tmp_path.glob(".out.partial*"))


def test_reload_that_differs_leaves_nothing(make_run, quick, tmp_path, monkeypatch):
    """A directory whose weights were altered after they were written is found out."""
    run = make_run()
    reload = verify.reload_logits

    def alter(directory, ids, code):
        path = directory / "model.safetensors"
        tensors = load_file(path)
        tensors["backbone.layers.1.mixer.out_proj.weight"][3, 3] += 1e-3
        save_file(tensors, path, metadata={"format": "pt"})
        return reload(directory, ids, code)

    monkeypatch.setattr(verify, "reload_logits", alter)
    with pytest.raises(JobError, match="logits differ from the run's in float32"):
        export(str(run), tmp_path / "out")
    assert nothing_left(tmp_path)


def test_reload_that_fails_leaves_nothing(make_run, tmp_path, monkeypatch):
    run = make_run()
    reload = verify.reload_logits

    def damage(directory, ids, code):
        path = directory / "model.safetensors"
        tensors = load_file(path)
        del tensors["backbone.layers.1.norm.weight"]
        save_file(tensors, path, metadata={"format": "pt"})
        return reload(directory, ids, code)

    monkeypatch.setattr(verify, "reload_logits", damage)
    with pytest.raises(JobError, match=r"fresh process, nothing was written\n.*backbone\.layers\.1\.norm\.weight"):
        export(str(run), tmp_path / "out")
    assert nothing_left(tmp_path)


def test_what_cannot_be_exported(make_run, make_checkpoint, tmp_path):
    with pytest.raises(UsageError, match="nothing to export"):
        export(str(make_checkpoint(name="plain")), tmp_path / "out")
    with pytest.raises(UsageError, match="--dtype int8: choose float32, bfloat16, float16"):
        export("anything", tmp_path / "out", dtype="int8")
    run = make_run()
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        export(str(run), full)
    assert [path.name for path in full.iterdir()] == ["precious"]
    notes = tmp_path / "notes.json"
    notes.write_text("{}")
    with pytest.raises(UsageError, match="no evaluation report"):
        export(str(run), tmp_path / "out", control=str(notes))
    shutil.rmtree(run / "phases")
    shutil.rmtree(run / "applied")
    with pytest.raises(UsageError, match="holds no model yet"):
        export(str(run), tmp_path / "out")
    assert nothing_left(tmp_path)
