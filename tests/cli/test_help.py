"""Every command's help: quick, with examples, and legible in a terminal of 80 columns."""

from __future__ import annotations

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
