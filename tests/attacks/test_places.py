"""Files outside a base are not read: by links, by an index, or by an adapter's description."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest

from surgery.checkpoint.links import check_links
from surgery.errors import UsageError
from surgery.evaluation.loading import locate


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors", "LICENSE"])
@pytest.mark.parametrize("relative", [False, True])
def test_a_link_that_leads_out(name, relative, base, refused):
    secret = base.parent / "secret"
    if (base / name).exists():
        shutil.move(base / name, secret)
    else:
        secret.write_text("secret")
    (base / name).symlink_to("../secret" if relative else secret)
    refused(name, "a link that leads out")


def test_a_link_through_a_link(base, refused):
    (base.parent / "secret").write_text("x")
    (base / "b").symlink_to("../secret")
    (base / "NOTICE").symlink_to("b")
    refused("a link that leads out")


def test_links_inside_and_of_a_hub_cache_pass(base, tmp_path):
    (base / "copy.json").symlink_to("config.json")
    check_links(base)
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "hash").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/hash")
    check_links(snapshot)
    (tmp_path / "mine").symlink_to(snapshot)
    check_links(tmp_path / "mine")


@pytest.mark.parametrize("target", ["../../refs/main", "../../../models--x/blobs/hash", "/etc/passwd"])
def test_a_hub_cache_that_leads_elsewhere(target, base, tmp_path, refused):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    shutil.move(base, snapshot)
    (snapshot / "NOTICE").symlink_to(target)
    base.symlink_to(snapshot)
    refused("NOTICE", "a link that leads out")


@pytest.mark.parametrize("place", ["../x.safetensors", "/x.safetensors", "..", "", "a/x.safetensors", "config.json"])
def test_an_index_that_leads_out(place, base, refused):
    index = {"metadata": {}, "weight_map": {"backbone.embeddings.weight": place}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("model.safetensors.index.json")


def test_an_adapter_beside_the_weights(base, refused):
    (base / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    refused("adapter_config.json", "an adapter")


@pytest.mark.parametrize("name", ["tokenizer.json", "special_tokens_map.json", "model.safetensors", "NOTICE"])
def test_a_pipe_among_the_files(name, base, refused):
    (base / name).unlink(missing_ok=True)
    os.mkfifo(base / name)
    refused(name, "neither a file nor a directory")


@pytest.mark.parametrize("place", ["/dev/zero", "../secret", "a/../../secret", ""])
@pytest.mark.parametrize("hashed", [True, False])
def test_checksums_of_what_lies_elsewhere(place, hashed, base, refused):
    (base.parent / "secret").write_text("")
    entry = {"bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    (base / "complete.json").write_text(json.dumps({"files": {place: entry}} if hashed else {place: 0}))
    refused("complete.json", "no file of this directory", ways=2)


def test_a_phase_whose_name_leads_out_of_its_run(base, tmp_path):
    run = tmp_path / "run"
    (run / "phases" / "01-a").mkdir(parents=True)
    shutil.copytree(base, tmp_path / "elsewhere" / "model")
    manifest = {
        "schema": 1, "surgery": "0.1.0", "recipe": "r", "base": "base", "layers": [0], "rule": "host", "exact": True,
        "phases": [{"name": "a/../../../elsewhere", "kind": "next-token", "status": "finished"}],
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match=r"run\.json: phases\.0\.name"):
        locate(str(run))
