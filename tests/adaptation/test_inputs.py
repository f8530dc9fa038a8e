"""Fingerprints of what a run reads say what it holds, and are made once for a file that does not change."""

from __future__ import annotations

import hashlib
import os

import pytest

from surgery.adaptation import inputs
from surgery.adaptation.inputs import changes, fingerprint, of_base, of_phase
from surgery.data.sources import sources


def test_a_file_is_read_again_only_when_its_size_or_time_changed(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one")
    (source,) = sources(str(path))
    first = fingerprint(source)
    assert first.sha256 == hashlib.sha256(b"one").hexdigest() and first.bytes == 3
    with monkeypatch.context() as patch:
        patch.setattr(inputs, "sha256", lambda file: pytest.fail(f"{file} was read again"))
        assert fingerprint(source, [first]) == first
    os.utime(path, ns=(0, first.mtime_ns + 1))
    again = fingerprint(source, [first])
    assert again.sha256 == first.sha256 and not list(changes([first], [again], "data"))
    path.write_bytes(b"two")
    (said,) = changes([first], [fingerprint(source, [first])], "data")
    assert said.startswith(f"data: {path} holds other content: 3 bytes, SHA-256 7692c3ad3540 before")


def test_a_file_more_in_a_directory_is_a_change(make_base, make_recipe, phase, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    recipe = make_recipe(make_base(), [phase("next-token", data=str(folder))])
    before = of_phase(recipe, 0)
    (folder / "b.txt").write_text("two")
    (said,) = changes(before, of_phase(recipe, 0, before), "data")
    assert "1 files before, 2 now" in said and "b.txt" in said


def test_the_bundled_text_and_a_base_have_fingerprints_and_a_hubs_have_none(make_base, tmp_path):
    (bundled,), (hub,) = sources("bundled"), sources("hub:owner/name")
    assert len(fingerprint(bundled).sha256) == 64 and not fingerprint(hub).sha256
    base = make_base()
    found = {record.name: record.sha256 for record in of_base(base)}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= found.keys() and all(found.values())
    snapshot = tmp_path / "snapshots" / "0123"
    snapshot.parent.mkdir()
    base.rename(snapshot)
    assert of_base(snapshot) == []
