"""``surgery apply --link``: weights that share the base's bytes, and a base that nothing later changes."""

from __future__ import annotations

import hashlib

import pytest

from surgery.checkpoint import files


@pytest.fixture(autouse=True)
def no_reflinks(monkeypatch):
    """Hard links are the dangerous kind, so they are what is tested, whatever the disk."""
    monkeypatch.setattr(files, "_clone", lambda *_: False)


@pytest.fixture
def linked(bases, write_recipe, surgery, tmp_path):
    """A checkpoint whose weights are hard links, its base and its recipe."""
    base = bases["gated_deltanet"]  # several shards
    recipe = write_recipe(
        f"model: {base}\nlayers: [1, 3]\nmemory: {{rule: bayesian}}\ndata: bundled\n"
        "phases: [{kind: hidden, steps: 2, context: 16, batch: 32, learning_rate: 0.1, trainable: swapped}]\n"
    )
    out = tmp_path / "out"
    result = surgery("apply", recipe, "--output", out, "--link", "--drift", "skip", "--json", "-")
    assert result.code == 0, result.err
    assert result.json["weights"] == "hard link" and "--link" not in result.err
    return base, recipe, out


def digests(directory):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.rglob("*.*"))}


def test_untouched_shards_are_the_bases_files(linked):
    base, _, out = linked
    old, new = (sorted(directory.glob("*.safetensors")) for directory in (base, out))
    assert len(new) == len(old) + 1
    assert all(one.samefile(other) for one, other in zip(old, new[:-1], strict=True))
    # what may differ from the base, or be edited by hand, is never shared
    assert not (out / "config.json").samefile(base / "config.json")
    assert not (out / "tokenizer.json").samefile(base / "tokenizer.json")


def test_operating_again_leaves_both_as_they_were(linked, write_recipe, surgery, tmp_path):
    base, _, out = linked
    before = digests(base), digests(out)
    recipe = write_recipe(f"model: {out}\nlayers: [0]\nmemory: {{rule: palimpsa}}\n", "again.yaml")
    result = surgery("apply", recipe, "--output", tmp_path / "again", "--link", "--drift", "skip", "--json", "-")
    assert result.code == 0, result.err
    assert result.json["weights"] == "hard link"
    result = surgery("revert", tmp_path / "again", "--output", tmp_path / "restored")
    assert result.code == 0, result.err
    assert (digests(base), digests(out)) == before


@pytest.mark.slow
def test_training_and_export_leave_the_base_as_it_was(linked, surgery, tmp_path):
    base, recipe, out = linked
    before = digests(base), digests(out)
    run = tmp_path / "run"
    result = surgery("distill", recipe, "--run", run, "--from", out, "--no-evaluation")
    assert result.code == 0, result.err
    assert digests(run) and (digests(base), digests(out)) == before
    exported = tmp_path / "exported"
    result = surgery("export", run, "--output", exported, "--dtype", "float32")
    assert result.code == 0, result.err
    assert (digests(base), digests(out)) == before


def test_a_failed_operation_leaves_the_base_as_it_was(linked, surgery, tmp_path, monkeypatch):
    base, recipe, _ = linked
    before = digests(base)

    def fail(*_, **__):
        raise OSError("broken")

    monkeypatch.setattr("surgery.operation.card", fail)  # after the links are made
    assert surgery("apply", recipe, "--output", tmp_path / "more", "--link", "--drift", "skip").code == 1
    assert digests(base) == before and not list(tmp_path.glob(".more*"))


def test_another_file_system_is_said_and_copied(bases, write_recipe, surgery, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.operation.same_file_system", lambda *_: False)
    recipe = write_recipe(f"model: {bases['mamba2']}\nlayers: [1]\nmemory: {{rule: host}}\n")
    result = surgery("apply", recipe, "--output", tmp_path / "out", "--link", "--drift", "skip", "--json", "-")
    assert result.code == 0 and result.json["weights"] == "copy"
    assert "--link" in result.err and "another file system" in result.err
    assert len(result.err.strip().splitlines()) == 1
