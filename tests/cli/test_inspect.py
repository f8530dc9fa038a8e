"""``surgery inspect``: tables, JSON, pictures, recipes, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil

import pytest


def refused(result, code, *words):
    assert result.code == code, result.err
    assert 1 <= len(result.err.strip().splitlines()) <= 5 and "Traceback" not in result.err
    assert not result.out
    for word in words:
        assert word in result.err


@pytest.mark.parametrize("family", ["mamba2", "gated_deltanet"])
def test_json_alone_on_stdout(surgery, bases, family):
    result = surgery("inspect", bases[family], "--tokens", 300, "--top", 2, "--metric", "log-mean", "--json", "-")
    assert result.code == 0, result.err
    found = result.json
    assert found["estimate"] == "measured" and found["tokens"] == 300 and found["host"] == family
    assert "pydoc_data.topics of Python" in found["text"]
    figures = {layer["layer"]: layer["log_mean"] for layer in found["layers"]}
    assert found["ranking"] == sorted(figures, key=figures.get, reverse=True)
    assert found["chosen"] == sorted(found["ranking"][:2])
    assert all(len(layer["heads"]) == 4 for layer in found["layers"])


def test_table_marks_the_top(surgery, bases, tmp_path):
    target = tmp_path / "found.json"
    result = surgery("inspect", bases["mamba2"], "--tokens", 300, "--top", 1, "--json", target)
    assert result.code == 0, result.err
    found = json.loads(target.read_text())
    lines = result.out.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.split()[:1] == ["layer"])  # the title above may wrap
    rows = [line.split() for line in lines[heading + 1 : heading + 5]]
    assert [int(row[row[0] == "●"]) for row in rows] == found["ranking"]
    assert [row[0] == "●" for row in rows] == [True, False, False, False]


def test_static_is_labelled(surgery, bases):
    result = surgery("inspect", bases["mamba2"], "--static")
    assert result.code == 0 and "static estimate" in result.out and "without data" in result.out
    assert surgery("inspect", bases["mamba2"], "--static", "--json", "-").json["estimate"] == "static"


def test_own_text_picture_and_recipe(surgery, bases, tmp_path):
    text = tmp_path / "mine.txt"
    text.write_text("the text of the user\n" * 200)
    recipe, plot = tmp_path / "out.yaml", tmp_path / "heads.png"
    options = ["--text", text, "--tokens", "1k", "--top", 2, "--recipe", recipe, "--plot", plot]
    result = surgery("inspect", bases["gated_deltanet"], *options)
    assert result.code == 0, result.err
    assert str(text) in result.out.replace("\n", "")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "rule: bayesian" in recipe.read_text()  # the rule with an exact start on this host
    # 2k tokens of context do not fit in this text, so the phases are cut to it
    cut = [option for i in range(2) for option in ("--set", f"phases.{i}.context=512")]
    checked = surgery("validate", recipe, *cut, "--json", "-")
    assert checked.code == 0, checked.err
    assert all(check["checked"] for check in checked.json["checks"])
    again = surgery("inspect", bases["gated_deltanet"], "--static", "--recipe", recipe)
    refused(again, 2, "exists already")


def test_upgraded_model_is_described(surgery, bases, write_recipe, tmp_path):
    recipe = write_recipe(f"model: {bases['mamba2']}\nlayers: [1]\nmemory: {{rule: palimpsa, start: paper}}\n")
    swapped = tmp_path / "swapped"
    assert surgery("apply", recipe, "--output", swapped, "--drift", "skip").code == 0
    result = surgery("inspect", swapped, "--tokens", 300)
    assert result.code == 0, result.err
    assert "palimpsa" in result.out and "spread" in result.out
    found = surgery("inspect", swapped, "--tokens", 300, "--json", "-").json
    described = [layer["layer"] for layer in found["layers"] if layer["diagnostics"]]
    assert described == [1]
    assert min(found["layers"][1]["diagnostics"]["importance_spread"]) > 0


def test_the_gain_of_an_upgraded_layer_is_shown(surgery, bases, write_recipe, tmp_path):
    recipe = write_recipe(
        f"model: {bases['gated_deltanet']}\nlayers: [1]\nmemory: {{rule: bayesian, start: paper, noise: restoring}}\n"
    )
    swapped, plot, figures = tmp_path / "swapped", tmp_path / "gains.png", tmp_path / "figures.json"
    assert surgery("apply", recipe, "--output", swapped, "--drift", "skip").code == 0
    result = surgery("inspect", swapped, "--tokens", 300, "--plot", plot, "--json", figures)
    assert result.code == 0, result.err
    assert plot.read_bytes().startswith(b"\x89PNG")
    described = json.loads(figures.read_text())["layers"][1]
    gain, host = (sorted(described["diagnostics"][name]) for name in ("gain", "host_gain"))
    assert gain[0] > 0 and gain[-1] <= 1 and gain != host
    header, *rows = (line.split() for line in result.out.splitlines() if "cond" in line or "bayesian" in line)
    shown = dict(zip(header[::-1], next(row for row in rows if "1" in row[:2])[::-1], strict=False))
    assert float(shown["gain"]) == pytest.approx(gain[len(gain) // 2], rel=5e-3)
    assert float(shown["host's"]) == pytest.approx(host[len(host) // 2], rel=5e-3)
    assert described["gains"]["tokens"] == [0, 300 - 16]


def test_refusals(surgery, bases, tmp_path):
    model = bases["mamba2"]
    short = tmp_path / "short.txt"
    short.write_text("five words are not enough")
    refused(surgery("inspect", model, "--metric", "meen"), 2, "--metric meen", "mean, log-mean, median")
    refused(surgery("inspect", model, "--text", "no/such.txt"), 2, "no/such.txt", "no such file")
    refused(surgery("inspect", model, "--text", short), 2, "short.txt", "25 tokens are shorter")
    refused(surgery("inspect", model, "--tokens", "1O0k"), 2, "--tokens", "1O0k")
    refused(surgery("inspect", model, "--tokens", "-5"), 2, "--tokens")
    refused(surgery("inspect", model, "--top", 9, "--static"), 2, "--top 9", "only 4 layers")
    refused(surgery("inspect", model, "--static", "--text", short), 2, "--static reads no text")
    refused(surgery("inspect", model, "--memory", "palimpsa"), 2, "--recipe")
    misspelt = ["--recipe", tmp_path / "r.yaml", "--memory", "palimsa"]
    refused(surgery("inspect", model, *misspelt), 2, "palimpsa or bayesian")
    refused(surgery("inspect", model, "--plot", tmp_path / "no" / "p.png"), 2, "does not exist")
    refused(surgery("inspect", model, "--plot", tmp_path / "p.bmp"), 2, ".png, .pdf or .svg")
    refused(surgery("inspect", tmp_path / "nothing"), 2, "no such directory")
    refused(surgery("inspect", "bundled:nothing"), 2, "no such bundled model")
    refused(surgery("inspect", model, "--device", "tpu"), 2, "auto, cpu or cuda")
    refused(surgery("inspect", model, "--probe", "palimsa"), 2, "--probe palimsa", "palimpsa or bayesian")
    refused(surgery("inspect", model, "--static", "--probe", "palimpsa"), 2, "--static", "--probe")
    refused(surgery("inspect", model, "--static", "--offload"), 2, "--static", "--offload")
    refused(surgery("inspect", model, "--probe", "palimpsa", "--tokens", 300), 2, "300 tokens", "512")
    assert not (tmp_path / "r.yaml").exists()


def test_unsupported_architecture_lists_the_supported(surgery, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for options in (["--static"], []):
        result = surgery("inspect", tmp_path, *options)
        assert result.code == 2 and "llama" in result.err and "mamba2" in result.err


def test_probe_stands_beside_n_t(surgery, bases, tmp_path):
    model, picture, recipe = bases["mamba2"], tmp_path / "p.png", tmp_path / "r.yaml"
    options = ["--tokens", 600, "--probe", "palimpsa", "--plot", picture, "--recipe", recipe]
    result = surgery("inspect", model, *options, "--json", tmp_path / "found.json")
    assert result.code == 0, result.err
    found = json.loads((tmp_path / "found.json").read_text())
    probe = found["probe"]
    assert probe["rule"] == "palimpsa" and probe["tokens"] == 511 and probe["context"] == 512
    assert [one["layer"] for one in probe["layers"]] == [0, 1, 2, 3] and all(one["kl"] > 0 for one in probe["layers"])
    table = {int(row[1] if row[0] == "●" else row[0]): row[-2:] for row in map(str.split, result.out.splitlines())
             if row and (row[1] if row[0] == "●" else row[0]).isdigit()}  # fmt: skip
    for one in probe["layers"]:
        assert table[one["layer"]] == [f"{one['kl']:.3g}", f"{one['slope']:+.3g}"]
    assert picture.stat().st_size > 0 and "rule: palimpsa" in recipe.read_text()
    streamed = surgery("inspect", model, "--tokens", 600, "--probe", "palimpsa", "--offload", "--json", "-").json
    assert streamed == found


def test_what_does_not_fit_is_said_on_stderr(surgery, bases, monkeypatch):
    whole = surgery("inspect", bases["mamba2"], "--tokens", 300, "--json", "-")
    monkeypatch.setattr("surgery.checkpoint.fitting.available_bytes", lambda _: 1000)
    result = surgery("inspect", bases["mamba2"], "--tokens", 300, "--json", "-")
    assert result.code == 0 and result.json == whole.json
    assert "read from the disk when it runs" in result.err and "read from the disk" not in whole.err
    forced = surgery("inspect", bases["mamba2"], "--tokens", 300, "--no-offload", "--json", "-")
    assert forced.json == whole.json and "read from the disk" not in forced.err


def test_help_has_examples(surgery):
    result = surgery("inspect", "--help")
    assert result.code == 0 and "surgery inspect bundled:tiny-gdn --top 4 --recipe mine.yaml" in result.out
    assert "surgery inspect bundled:tiny-mamba2 --probe palimpsa" in result.out


@pytest.mark.parametrize("command", ["inspect", "eval"])
def test_a_cut_off_weight_file_is_named(surgery, bases, tmp_path, command):
    broken = tmp_path / "broken"
    shutil.copytree(bases["mamba2"], broken)
    (weights,) = broken.glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size - 100)
    result = surgery(command, broken, "--tokens", 300)
    assert result.code == 2 and str(weights) in result.err and "download" in result.err
    assert "Traceback" not in result.err and len(result.err.strip().splitlines()) <= 5


def test_capacity_says_whether_memory_limits(surgery, bases, tmp_path):
    plot, target = tmp_path / "capacity.svg", tmp_path / "capacity.json"
    options = ["--capacity", "--tokens", "2k", "--json", target, "--plot", plot]
    result = surgery("inspect", bases["gated_deltanet"], *options)
    assert result.code == 0, result.err
    found = json.loads(target.read_text())
    assert found["kind"] == "capacity" and found["verdict"]["kind"] == "cannot recall"  # random weights recall nothing
    assert [(cell["pairs"], cell["length"]) for cell in found["cells"]] == [(4, None)]
    words = " ".join(result.out.split())
    assert found["verdict"]["words"] in words and "not asked: 4 pairs are recalled to 0.0" in words
    assert "list_recall" in plot.read_text()
    for option in (["--static"], ["--top", 2], ["--probe", "palimpsa"], ["--recipe", tmp_path / "r.yaml"]):
        refused = surgery("inspect", bases["gated_deltanet"], "--capacity", *option)
        assert refused.code == 2 and f"leave out {option[0]}" in refused.err and not refused.out
    few = surgery("inspect", bases["gated_deltanet"], "--capacity", "--tokens", 300)
    assert few.code == 2 and "--tokens: 6 documents of" in few.err
