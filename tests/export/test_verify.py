"""``surgery verify`` finds what was changed after the export, and runs none of the directory's code."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgery.checkpoint.checksums import entry
from surgery.errors import UsageError
from surgery.export.checking import verify
from surgery.export.manifest import FILE, code_in, read_manifest
from surgery.export.run import export
from surgery.export.standalone import digest_of


@pytest.fixture
def exported(make_run, quick, tmp_path):
    export(str(make_run("mamba2", "palimpsa")), tmp_path / "out", dtype="bfloat16")
    return tmp_path / "out"


def faults(directory):
    return {finding.check: finding.faults for finding in verify(directory).findings if finding.faults}


def agree_again(directory, *names):
    """Write the files' checksums anew, as someone who covers a change up would."""
    manifest = json.loads((directory / FILE).read_text())
    manifest["files"] |= {name: entry(directory / name) for name in names}
    manifest["code"]["sha256"] = digest_of(code_in(directory))
    (directory / FILE).write_text(json.dumps(manifest))


def test_what_was_exported_passes(exported):
    done = verify(exported)
    assert done.passed and not done.notes
    good = {finding.check: finding.good for finding in done.findings}
    assert "as installed here" in good["code"]
    assert good["logits"] == "16 tokens in float32 equal the fingerprint bit for bit"
    names = {str(path.relative_to(exported)) for path in exported.rglob("*")} - {FILE}
    assert read_manifest(exported).files.keys() == names


def test_every_changed_file_is_named(exported):
    (exported / "README.md").write_text("another card")
    (exported / "tokenizer.json").unlink()
    with (exported / "surgery_models_mamba2.py").open("a") as file:
        file.write("raise SystemExit('run')\n")
    (exported / "evil.py").write_text("raise SystemExit('run')")
    (exported / "picture.png").write_bytes(b"")
    found = faults(exported)
    assert len(found["files"]) == 4 and len(found["code"]) == 1
    for name in ("README.md", "tokenizer.json", "surgery_models_mamba2.py", "evil.py"):
        assert any(fault.startswith(name) for fault in found["files"])
    assert verify(exported).notes == ["picture.png was added after the export"]


def test_a_weight_that_was_changed_with_its_checksum(exported):
    """The fingerprint says that the model computes something else."""
    path = exported / "model.safetensors"
    tensors = load_file(path)
    tensors["backbone.layers.1.mixer.out_proj.weight"] *= 1.5
    save_file(tensors, path, metadata={"format": "pt"})
    assert set(faults(exported)) == {"files", "logits"}
    agree_again(exported, path.name)
    assert set(faults(exported)) == {"logits"}
    tensors["backbone.layers.1.mixer.out_proj.weight"][2, 3] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    agree_again(exported, path.name)
    found = faults(exported)
    assert set(found) == {"tensors", "logits"} and "out_proj.weight" in found["tensors"][0]


def test_code_that_was_changed_with_its_checksum_is_remarked(exported):
    path = exported / "surgery_kernels_chunks.py"
    path.write_text(path.read_text() + "x = 1\n")
    agree_again(exported, path.name)
    done = verify(exported)
    assert done.passed and len(done.notes) == 1 and "installed here" in done.notes[0]


def test_a_tensor_that_is_missing(exported):
    path = exported / "model.safetensors"
    tensors = load_file(path)
    del tensors["backbone.layers.0.mixer.memory.dose"]
    save_file(tensors, path, metadata={"format": "pt"})
    assert "memory.dose" in faults(exported)["tensors"][0]


def test_without_code(make_run, quick, tmp_path):
    export(str(make_run()), tmp_path / "out", code=False)
    assert verify(tmp_path / "out").passed
    (tmp_path / "out" / "surgery_models_mamba2.py").write_text("x = 1\n")
    assert set(faults(tmp_path / "out")) == {"files", "code"}


def edited(key, value):
    def edit(manifest):
        manifest[key] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (edited("schema_version", 9), "schema_version"),
        (edited("files", {"config.json": 3}), r"files\.config\.json"),
        (edited("fingerprint", {"tokens": ["x"]}), "fingerprint"),
        (edited("more", 1), "more"),
    ],
)
def test_a_damaged_manifest(exported, edit, words):
    manifest = json.loads((exported / FILE).read_text())
    edit(manifest)
    (exported / FILE).write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=f"{FILE}: {words}"):
        verify(exported)


def test_a_fingerprint_that_does_not_fit_the_model(exported):
    manifest = json.loads((exported / FILE).read_text())
    manifest["fingerprint"]["tokens"][3] = 10**6
    (exported / FILE).write_text(json.dumps(manifest))
    assert "not of a vocabulary of 256" in faults(exported)["logits"][0]


def test_files_outside_are_not_read(exported):
    secret = exported.parent / "secret"
    secret.write_text("secret")
    manifest = json.loads((exported / FILE).read_text())
    manifest["files"]["../secret"] = entry(secret)
    (exported / FILE).write_text(json.dumps(manifest))
    assert faults(exported) == {"files": ["../secret is missing"]}


def test_nothing_to_verify(make_checkpoint, tmp_path):
    with pytest.raises(UsageError, match=f"holds no {FILE}"):
        verify(make_checkpoint())
    with pytest.raises(UsageError, match="no such directory"):
        verify(tmp_path / "none")
