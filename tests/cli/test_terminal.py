"""Names and paths are printed as they are, on terminals and into pipes of every kind, and no work is lost over them."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import surgery.cli
from surgery.cli import terminal

NAMES = ["[", "[red]x", "[bold", ":smile:", "[link=x]", "\\[x]", "y" * 240, "y" * 255, os.fsdecode(b"\xff\xfe"), "a b"]


@pytest.fixture
def here(bases, tmp_path, monkeypatch):
    shutil.copytree(bases["mamba2"], tmp_path / "[b]base")
    (tmp_path / "recipe.yaml").write_text("model: '[b]base'\nlayers: [1]\nmemory: {rule: palimpsa}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_an_output_of_any_name_is_written_and_printed(name, surgery, here):
    result = surgery("apply", "recipe.yaml", "--output", name, "--drift", "skip")
    assert result.code == 0, result.err
    assert (here / name / "config.json").is_file()
    shown = name.encode("utf-8", "replace").decode()
    assert f"Written: {here / shown}\n" in result.out and "[b]base (mamba2" in result.out
    assert sorted(path.name for path in here.iterdir()) == sorted(["[b]base", "recipe.yaml", name])


def test_a_name_that_no_disk_takes_is_refused_first(surgery, here):
    for args in (["--output", "y" * 256], ["--output", "o", "--json", "y" * 256]):
        surgery("apply", "recipe.yaml", "--drift", "skip", *args).refused(2, f"{args[-2]} yyy", "256 bytes", "255")
    assert not (here / "o").exists()


def test_files_of_long_and_odd_names(surgery, here):
    result = surgery(
        "inspect", "[b]base", "--static", "--plot", f"[x]{'p' * 240}.png", "--recipe", f"[y]{'r' * 240}.yaml", "--json",
        "[z]" + "j" * 250,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "[b]base (mamba2)" in result.out and "picture: [x]ppp" in result.err and "recipe: [y]rrr" in result.err
    assert json.loads((here / ("[z]" + "j" * 250)).read_text())["model"] == "[b]base"


def test_no_command_prints_markup():
    """The consoles take none, so text in it would be shown with its brackets."""
    for path in sorted(Path(surgery.cli.__file__).parent.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        assert "rich.markup" not in source, path
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        made = [node for node in calls if getattr(node.func, "id", "") in ("Console", "TextColumn")]
        for node in made:
            markup = [word.value.value for word in node.keywords if word.arg == "markup"]
            assert markup == [False], f"{path}:{node.lineno}"


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii", "utf-8"])
def test_a_character_that_the_encoding_lacks_is_replaced(encoding, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    terminal.make_tolerant()
    terminal.console().print("● 漢 é \udcff [b]", highlight=False)
    sys.stdout.flush()
    text = raw.getvalue().decode(encoding)
    assert text.endswith("? [b]\n") and len(text.split()) == 5
    assert ("●" in text) == (encoding == "utf-8") and ("é" in text) == (encoding != "ascii")


def test_a_reader_that_goes_away_ends_the_printing_and_not_the_work(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(os.fdopen(writing, "wb"), encoding="utf-8"))
    terminal.make_tolerant()
    for number in range(3):
        terminal.console().print(f"line {number}")
        print("x" * 100_000)
    sys.stdout.flush()


def test_stdout_that_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    terminal.make_tolerant()
    terminal.console().print("nobody reads this")
