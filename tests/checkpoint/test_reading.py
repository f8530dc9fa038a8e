"""Checkpoints on disk: what is read, and what is refused before any work."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from surgery.checkpoint.reading import check_tensors, open_checkpoint, read_header
from surgery.errors import UsageError

CONFIG = {"model_type": "mamba2", "num_hidden_layers": 1}


def tensors():
    return {
        "a": torch.randn(3, 4),
        "b": torch.randn(2, 3, dtype=torch.float64).to(torch.bfloat16),
        "c": torch.randint(0, 9, (5,), dtype=torch.int64),
        "d": torch.randn(()),
    }


@pytest.fixture
def single(tmp_path):
    directory = tmp_path / "single"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors(), directory / "model.safetensors")
    return directory


@pytest.fixture
def sharded(tmp_path):
    directory = tmp_path / "sharded"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    every = tensors()
    parts = {"model-00001-of-00002.safetensors": ("a", "c"), "model-00002-of-00002.safetensors": ("b", "d")}
    for name, keys in parts.items():
        save_file({key: every[key] for key in keys}, directory / name)
    index = {"metadata": {"total_size": 1}, "weight_map": {key: name for name, keys in parts.items() for key in keys}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def refused(directory, *words):
    with pytest.raises(UsageError) as caught:
        open_checkpoint(directory)
    text = str(caught.value)
    assert len(text.splitlines()) <= 4
    for word in words:
        assert word in text
    return text


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_headers_and_tensors(layout, request):
    directory = request.getfixturevalue(layout)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config == CONFIG
    expected = {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}
    assert set(checkpoint.tensors) == set(expected)
    for name, value in expected.items():
        entry = checkpoint.tensors[name]
        assert entry.shape == tuple(value.shape)
        assert entry.nbytes == value.numel() * value.element_size()
        assert torch.equal(checkpoint.read(name), value)
        assert checkpoint.read(name).dtype == value.dtype
    assert checkpoint.tensors["b"].dtype == "BF16"
    assert checkpoint.largest_tensor() == 48
    assert checkpoint.weight_bytes == sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def test_missing_directory_and_configuration(tmp_path, single):
    refused(tmp_path / "nowhere", "does not exist", "config.json")
    refused(single / "config.json", "is a file")
    (single / "config.json").unlink()
    refused(single, "config.json", "no such file")


@pytest.mark.parametrize(("text", "words"), [("{", [":1:", "not JSON"]), ("[1]", ["not a JSON object"])])
def test_broken_configuration(text, words, single):
    (single / "config.json").write_text(text)
    refused(single, "config.json", *words)


def test_pickles_are_refused_with_the_reason(single):
    (single / "model.safetensors").unlink()
    refused(single, "holds no model.safetensors")
    (single / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    refused(single, "pytorch_model.bin", "run code", "save_pretrained()")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.99])
def test_truncated_file(share, single):
    path = single / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    refused(single, str(path), "truncated or damaged", f"{int(share * len(data))} bytes", "download")


def test_one_byte_more_or_less(single):
    path = single / "model.safetensors"
    data = path.read_bytes()
    for damaged in (data[:-1], data + b"\0"):
        path.write_bytes(damaged)
        refused(single, "truncated or damaged")
    path.write_bytes(data)
    open_checkpoint(single)


@pytest.mark.parametrize("header", [b"\xff" * 8, struct.pack("<Q", 2**40) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_hostile_headers(header, single):
    (single / "model.safetensors").write_bytes(header)
    refused(single, "truncated or damaged")


def test_lfs_placeholder(single):
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(single, "Git LFS", "git lfs pull")


def test_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, "1 of 2 shards missing", "model-00002-of-00002.safetensors")


def test_truncated_shard_is_named(sharded):
    path = sharded / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    refused(sharded, str(path), "truncated")


def test_index_that_does_not_fit(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["a"] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))
    refused(sharded, "a not in the shard")
    index["weight_map"] = {}
    path.write_text(json.dumps(index))
    refused(sharded, "no weight_map")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "weights.bin"])
def test_index_that_points_elsewhere(name, sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["a"] = name
    path.write_text(json.dumps(index))
    refused(sharded, name, "beside the index")


def test_one_tensor_in_two_shards(sharded):
    first = load_file(sharded / "model-00001-of-00002.safetensors")
    second = load_file(sharded / "model-00002-of-00002.safetensors")
    save_file(second | {"a": first["a"]}, sharded / "model-00002-of-00002.safetensors")
    refused(sharded, "tensor a is also in")


def test_expected_tensors(single):
    checkpoint = open_checkpoint(single)
    check_tensors(checkpoint, {"a": (3, 4), "b": (2, 3)}, "mamba2")
    for expected, words in (
        ({"a": (4, 3)}, ["a: has shape [3, 4]", "implies [4, 3]"]),
        ({"e": (1,), "a": (3, 4)}, ["1 tensors of mamba2 are missing: e"]),
        ({"c": (5,)}, ["c: has dtype I64", "BF16"]),
    ):
        with pytest.raises(UsageError) as caught:
            check_tensors(checkpoint, expected, "mamba2")
        for word in [str(single), *words]:
            assert word in str(caught.value)


def test_only_headers_are_read(tmp_path):
    """A file whose data would not fit in memory is described at once: only its size on disk is real."""
    path = tmp_path / "model.safetensors"
    size = 1 << 40
    header = json.dumps({"big": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # a hole
    (entry,) = read_header(path)
    assert entry.nbytes == size
