"""Running out of memory is an error with a message."""

from __future__ import annotations

import sys

import pytest

import surgery.cli as cli


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_out_of_memory(error, monkeypatch, capsys):
    def fail():
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(cli, "_register", lambda: None)
    monkeypatch.setattr(sys, "argv", ["surgery"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    text = capsys.readouterr().err
    assert text.startswith("error: there is not enough memory") and "MemoryError" not in text
