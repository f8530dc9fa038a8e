"""``surgery eval``: tables, JSON, pictures, runs, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch

from surgery.data.texts import load_text
from surgery.data.tokens import encode


def refused(result, code, *words):
    assert result.code == code, result.err
    assert 1 <= len(result.err.strip().splitlines()) <= 5 and "Traceback" not in result.err
    assert not result.out
    for word in words:
        assert word in result.err


def test_json_against_the_model_itself(surgery, bases, tmp_path):
    """Perplexity and bits per byte of a whole text in one forward, computed here from the logits."""
    from surgery.evaluation.loading import load_tokenizer
    from surgery.hosts import load_model

    text = tmp_path / "text.txt"
    text.write_text(load_text("bundled").text[:700] + "déjà vu — ≥ 3")
    options = ["--text", text, "--recall-lengths", "none", "--json", "-"]
    found = surgery("eval", bases["mamba2"], *options)
    assert found.code == 0, found.err
    tokens = encode(load_tokenizer(bases["mamba2"]), text.read_text())
    with torch.no_grad():
        logits = load_model(bases["mamba2"], dtype=torch.float32)(tokens.ids[None]).logits[0, :-1].double()
    nll = torch.nn.functional.cross_entropy(logits, tokens.ids[1:], reduction="sum")
    size = len(text.read_bytes())
    model = found.json["model"]
    assert model["bytes"] == size - 1 and found.json["text"]["bytes"] == size
    assert model["perplexity"] == pytest.approx((nll / (len(tokens) - 1)).exp().item(), rel=1e-4)
    assert model["bits_per_byte"] == pytest.approx(nll.item() / math.log(2) / (size - 1), rel=1e-4)
    assert found.json["command"].startswith("surgery eval ")
    assert found.json["measured_with"]["dtype"] == "float32"


def test_one_rule_for_the_token_before_a_text(surgery, bases, tmp_path):
    """Perplexity and recall begin as the tokenizer does, and both forms of the report say so."""
    from tokenizers import Tokenizer, processors

    from surgery.hosts import load_model

    base = shutil.copytree(bases["mamba2"], tmp_path / "base")
    text, target = tmp_path / "text.txt", tmp_path / "eval.json"
    text.write_text(load_text("bundled").text[:2000])
    options = ["--text", text, "--recall-lengths", "300", "--recall-samples", 1, "--json", target]
    assert "no token is put before a text or a prompt" in surgery("eval", base, *options).out
    before = json.loads(target.read_text())
    assert before["text"]["begin_token"] is None and before["model"]["recall"]["begin_token"] is None
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", end)])
    tokenizer.save(str(base / "tokenizer.json"))
    assert "every text and prompt begins with <|end|>" in surgery("eval", base, *options).out
    after = json.loads(target.read_text())
    assert after["text"]["begin_token"] == after["model"]["recall"]["begin_token"] == "<|end|>"
    assert after["text"]["tokens"] == before["text"]["tokens"] + 1 and after["text"]["bytes"] == before["text"]["bytes"]
    # now the first byte has something before it and is scored as well
    ids = torch.tensor([[end, *tokenizer.encode(text.read_text(), add_special_tokens=False).ids]])
    with torch.no_grad():
        logits = load_model(base, dtype=torch.float32)(ids).logits[0, :-1].double()
    nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()
    assert after["model"]["nll"] == pytest.approx(nll, rel=1e-4)
    assert after["model"]["bytes"] == after["text"]["bytes"]


def test_a_column_names_the_text_of_local_records(surgery, bases, tmp_path):
    plain, records = tmp_path / "text.txt", tmp_path / "records.csv"
    plain.write_text(load_text("bundled").text[:1500].replace('"', "'"))
    records.write_text('id,body\n1,"' + plain.read_text() + '"\n')
    options = ["--tokens", 400, "--recall-lengths", "none", "--json", "-"]
    found = surgery("eval", bases["mamba2"], "--text", f"{records},column=body", *options)
    assert found.code == 0, found.err
    assert found.json["model"] == surgery("eval", bases["mamba2"], "--text", plain, *options).json["model"]
    words = ("--text", "records.csv, record 1 has no text under 'text'", "column=FIELD: id, body")
    refused(surgery("eval", bases["mamba2"], "--text", records, *options), 2, *words)
    look = surgery("inspect", bases["mamba2"], "--text", f"{records},column=body", "--tokens", 400, "--json", "-")
    assert look.code == 0 and look.json["tokens"] == 400


def test_baseline_table_and_picture(surgery, bases, tmp_path):
    plot, target = tmp_path / "eval.png", tmp_path / "eval.json"
    haystack = tmp_path / "hay.txt"
    haystack.write_text(load_text("bundled").text[:4000])
    options = ["--tokens", 600, "--context", 64, "--recall-lengths", "300,280", "--recall-samples", 1]
    options += ["--haystack", haystack, "--plot", plot, "--json", target]
    result = surgery("eval", bases["mamba2"], "--baseline", bases["gated_deltanet"], *options)
    assert result.code == 0, result.err
    found = json.loads(target.read_text())
    assert found["difference"]["paired"] and found["context"] == 64
    assert [row["length"] for row in found["model"]["recall"]["lengths"]] == [280, 300]
    assert found["baseline"]["recall"]["haystack"] == str(haystack)
    assert f"{found['model']['perplexity']:,.3f}" in result.out
    assert f"x {found['difference']['perplexity_ratio']['mean']:.4f}" in result.out
    assert "RULER-style" in result.out and "280 tokens" in result.out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_tasks_beside_a_baseline_and_a_control(surgery, bases, tmp_path):
    plot, target = tmp_path / "eval.svg", tmp_path / "eval.json"
    options = ["--tokens", 300, "--recall-lengths", "none", "--tasks", "list_update,single_1", "--lengths", "own,500"]
    options += ["--pairs", "4,16", "--samples", 2, "--plot", plot, "--json", target]
    models = [bases["mamba2"], "--baseline", bases["gated_deltanet"], "--control", bases["mamba2"]]
    result = surgery("eval", *models, *options)
    assert result.code == 0, result.err
    found = json.loads(target.read_text())
    assert [(cell["task"], cell["length"], cell["pairs"]) for cell in found["model"]["tasks"]["cells"]] == [
        ("list_update", None, 4), ("list_update", None, 16), ("list_update", 500, 4), ("single_1", 500, None)
    ]  # fmt: skip
    assert [cell["pairs"] for cell in found["model"]["tasks"]["left_out"]] == [16]
    assert {
        cell["scores"][name]["mean"] for cell in found["control_difference"]["tasks"] for name in cell["scores"]
    } == {0}
    assert len(found["difference"]["tasks"]) == 4 and "single_1" in plot.read_text()
    assert "list_update" in result.out and "minus baseline" in result.out and "minus control" in result.out
    assert "left out: list_update at 500 tokens: 16 pairs and their questions take" in " ".join(result.out.split())


def test_documents_of_another_tokenizer_are_not_paired(surgery, bases, tmp_path):
    from tokenizers import Tokenizer, processors

    other = shutil.copytree(bases["mamba2"], tmp_path / "other")
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", end)])
    tokenizer.save(str(other / "tokenizer.json"))
    options = ["--tokens", 300, "--recall-lengths", "none", "--tasks", "list_recall", "--lengths", "own", "--pairs", 4]
    result = surgery("eval", bases["mamba2"], "--baseline", other, *options, "--samples", 2)
    assert result.code == 0, result.err
    assert "minus baseline" not in result.out and "the baseline reads other tokens" in result.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tasks", "needle"], ("--tasks task 'needle'", "list_recall")),
        (["--pairs", "4"], ("--pairs 4", "add --tasks")),
        (["--samples", 3], ("--samples 3", "add --tasks")),
        (["--tasks", "single_1", "--pairs", "4"], ("--pairs 4", "add --tasks list_recall")),
        (["--tasks", "single_1", "--lengths", "own"], ("--lengths own", "only lists")),
        (["--tasks", "single_1", "--lengths", "256,256"], ("--lengths 256,256", "each length once")),
        (["--tasks", "list_recall", "--lengths", "own,own"], ("--lengths own,own", "each length once")),
        (["--tasks", "list_recall", "--pairs", "4,600"], ("--pairs 4,600", "2 to 512")),
        (["--tasks", "list_recall", "--pairs", "4,x"], ("--pairs", "'x'")),
        (["--tasks", "list_recall", "--samples", 0], ("--samples 0",)),
        (["--tasks", "list_recall", "--lengths", "40", "--pairs", "8"], ("list_recall at 40 tokens", "fewer pairs")),
        (["--tasks", "single_2", "--lengths", "900k"], ("single_2 at 900000 tokens", "longer text")),
        (["--control", "bundled:nothing"], ("--control", "no such bundled model")),
    ],
)
def test_tasks_that_cannot_be_asked_are_refused(options, words, surgery, bases):
    refused(surgery("eval", bases["mamba2"], "--recall-lengths", "none", *options), 2, *words)


def test_run_is_its_latest_model_and_keeps_the_report(surgery, bases, write_recipe, tmp_path):
    run = tmp_path / "run"
    recipe = write_recipe(f"model: {bases['mamba2']}\nlayers: [1]\nmemory: {{rule: palimpsa}}\n")
    assert surgery("distill", recipe, "--run", run).code == 0
    result = surgery("eval", run, "--tokens", 300, "--recall-lengths", "none", "--json", "-")
    assert result.code == 0, result.err
    kept = json.loads((run / "evaluation" / "applied.json").read_text())
    assert kept == result.json
    assert kept["checkpoint"] == "applied"


def test_refusals(surgery, bases, tmp_path):
    model = bases["mamba2"]
    short = tmp_path / "short.txt"
    short.write_text("short")
    tight = ["--text", short, "--context", 64, "--recall-lengths", "none"]
    refused(surgery("eval", model, *tight), 2, "5 tokens are shorter")
    refused(surgery("eval", model, "--text", tmp_path / "none.txt"), 2, "none.txt", "no such file")
    refused(surgery("eval", model, "--haystack", tmp_path / "none.txt"), 2, "none.txt", "no such file")
    refused(surgery("eval", model, "--haystack", short), 2, "needle recall", "longer text")
    refused(surgery("eval", model, "--recall-lengths", "20"), 2, "needle recall at 20 tokens")
    refused(surgery("eval", model, "--recall-lengths", "256,x"), 2, "--recall-lengths", "'x'")
    refused(surgery("eval", model, "--recall-lengths", "256,256"), 2, "each length once")
    refused(surgery("eval", model, "--recall-samples", 0), 2, "--recall-samples 0")
    refused(surgery("eval", model, "--tokens", "0"), 2, "--tokens")
    refused(surgery("eval", model, "--baseline", "bundled:nothing"), 2, "no such bundled model")
    refused(surgery("eval", model, "--plot", "plot.jpeg2"), 2, ".png, .pdf or .svg")
    refused(surgery("eval", model, "--json", tmp_path / "no" / "x.json"), 2, "does not exist")


@pytest.mark.parametrize("command", ["eval", "inspect", "static", "revert", "export"])
def test_a_configuration_that_is_refused_is_named_by_its_place(command, surgery, bases, tmp_path):
    other = shutil.copytree(bases["mamba2"], tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": {"load_in_8bit": True}}))
    words = {
        "eval": ("eval", bases["mamba2"], "--baseline", other, "--tokens", "300", "--recall-lengths", "none"),
        "static": ("inspect", other, "--static"),
    }.get(command, (command, other, *(["--output", tmp_path / "out"] if command != "inspect" else [])))
    refused(surgery(*words), 2, f"{other}/config.json: quantization_config", "8 bits")


def test_a_baseline_is_checked_before_the_model_is_measured(surgery, bases, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.evaluation.report.measure", lambda *_, **__: pytest.fail("measured"))
    other = shutil.copytree(bases["mamba2"], tmp_path / "other")
    (other / "tokenizer.json").unlink()
    asked = ("eval", bases["mamba2"], "--baseline", other, "--tokens", "300", "--recall-lengths", "none")
    refused(surgery(*asked), 2, str(other), "no tokenizer")
    shutil.copy(bases["mamba2"] / "tokenizer.json", other)
    weights = next(other.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-9])
    refused(surgery(*asked), 2, str(weights), "truncated or damaged")


def test_help_has_examples(surgery):
    result = surgery("eval", "--help")
    assert result.code == 0 and "surgery eval bundled:tiny-mamba2" in result.out
