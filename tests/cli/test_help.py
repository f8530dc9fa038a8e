"""Every command's help: quick, with examples, and legible in a terminal of 80 columns."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from surgery.cli import COMMANDS

MAIN = "import sys; from surgery.cli import main; sys.argv[0] = 'surgery'; main()"


def run(*words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}
    return subprocess.run([sys.executable, "-c", MAIN, *words], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_whole_sentences(command):
    words = {"recipes": ["recipes", "show"], "reproduce": ["reproduce", "collision"]}.get(command, [command])
    result = run(*words, "--help")
    assert result.returncode == 0, result.stderr
    assert "Example" in result.stdout and f"surgery {command}" in result.stdout
    lines = [line.strip() for line in result.stdout.split("╭")[0].splitlines()]
    prose = "\n".join(lines).split("Example")[0].strip().split("\n\n")
    for paragraph in prose[1:]:  # after the usage line
        # a line that ends early within a paragraph is a break of the source, not of the terminal
        broken = paragraph.split("\n")[:-1]
        assert all(len(line) > 50 for line in broken), paragraph


def test_help_does_not_import_torch():
    code = "import sys; from surgery.cli import _register; _register(); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr


def test_an_unknown_command_is_usage():
    result = run("inspct")
    assert result.returncode == 2 and "Traceback" not in result.stderr


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "recipes"])
def test_a_place_for_json_is_checked_before_any_work(command, surgery, tmp_path):
    words = {"reproduce": ["collision"]}.get(command, ["demo-bayesian"])
    if command in ("hosts", "check", "demo"):
        words = []
    outputs = {"apply": ["--output", tmp_path / "out"], "export": ["--output", tmp_path / "out"]}.get(command, [])
    for target, reason in ((tmp_path / "absent" / "x.json", "does not exist"), (tmp_path, "is a directory")):
        result = surgery(command, *words, *outputs, "--json", target)
        assert result.code == 2 and f"--json {target}" in result.err and reason in result.err, result.err
        assert len(result.err.strip().splitlines()) == 1 and not result.out


def test_the_systems_errors_name_the_place(surgery, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "x.safetensors"))

    monkeypatch.setattr("surgery.hosts.resolve", refuse)
    result = surgery("inspect", tmp_path, "--static")
    first, *rest = result.err.strip().splitlines()
    assert result.code == 1 and first == f"error: {tmp_path / 'x.safetensors'}: Permission denied" and len(rest) == 1
