"""Every kind of row on a tiny model on the CPU, and rows that fail."""

from __future__ import annotations

import json
import sys

import pytest

from surgery.benchmark import __main__ as command
from surgery.benchmark import measures, models
from surgery.benchmark.rows import ROWS

TINY = {
    "mamba2-2.7b": {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8},
    "gdn-340m": {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 8},
}


@pytest.fixture
def on_a_cpu(monkeypatch):
    for shape, size in TINY.items():
        monkeypatch.setitem(models.CONFIGS, shape, {**models.CONFIGS[shape], **size, "vocab_size": 40})
        monkeypatch.setitem(models.LAYERS, shape, [1])
    monkeypatch.setattr(models, "DEVICE", "cpu")
    ran = []
    monkeypatch.setattr(measures, "median", lambda run, count, calls=1: ran.append(run()) or 2.0)
    monkeypatch.setattr(measures, "peak", lambda: 0.0)
    monkeypatch.setattr(measures, "compiled_mixers", lambda active=True: measures.torch.enable_grad())
    return ran


@pytest.mark.parametrize("name", [name for name in ROWS if "v512" not in name and "32768" not in name])
def test_row(on_a_cpu, name):
    row = ROWS[name]
    arguments = {**row.arguments, "batch": 2}
    if "tokens" in arguments:
        arguments["tokens"] = 20
    if row.measure == "decoding":
        with measures.torch.no_grad():
            result = measures.decoding(**arguments)
    else:
        result = getattr(measures, row.measure)(**arguments)
    assert len(on_a_cpu) == (1 if row.measure == "training" else 2)
    assert command.line(name, result).startswith(name)
    if row.measure == "training":
        assert result["tokens_per_second"] == 2 * 20 / 2.0 * 1e3
        model, _ = models.build(row.arguments["shape"], "host")
        whole = sum(parameter.numel() for parameter in model.parameters())
        assert (result["trained_parameters"] >= whole) == (row.arguments["trainable"] == "all")


def test_rows_go_on_after_a_failure_and_after_a_crash(monkeypatch):
    script = (
        "import json, os, sys\n"
        "for name in sys.argv[1:]:\n"
        "    if name == 'crash': os._exit(9)\n"
        "    if name == 'fail': print(json.dumps({'failed': 'why'}), flush=True); sys.exit(3)\n"
        "    print('noise'); print(json.dumps({'ms': len(name)}), flush=True)\n"
    )
    real = command.subprocess.Popen

    def start(words, **options):
        assert words[1:4] == ["-m", "surgery.benchmark", "--worker"]
        return real([sys.executable, "-c", script, *words[4:]], **options)

    monkeypatch.setattr(command.subprocess, "Popen", start)
    found = list(command.measured(["a", "crash", "fail", "bb", "fail"]))
    ended = {"failed": "its process ended with status 9"}
    failed = {"failed": "why"}
    assert found == [("a", {"ms": 1}), ("crash", ended), ("fail", failed), ("bb", {"ms": 2}), ("fail", failed)]
    assert "failed: why" in command.line("fail", failed)


def test_a_failure_is_a_row(monkeypatch, capsys):
    def broken(**arguments):
        raise RuntimeError("no\nroom")

    monkeypatch.setattr(measures, "mixer", broken)
    assert command.work([next(iter(ROWS))]) == command.FAILED
    assert json.loads(capsys.readouterr().out) == {"failed": "RuntimeError: no room"}


def test_unknown_rows_are_named(capsys):
    with pytest.raises(SystemExit):
        command.main(["mixers"])
    assert "no row or group 'mixers'" in capsys.readouterr().err
