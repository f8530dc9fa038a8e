"""Pickled weights: nothing is read before it is allowed, nothing but tensors ever, and once converted all is as with
safetensors."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file

from surgery import hosts
from surgery.checkpoint import pickles
from surgery.checkpoint.pickles import pickles_allowed, unpickled
from surgery.checkpoint.reading import open_checkpoint
from surgery.errors import UsageError

CONFIG = {
    "d_model": 16, "n_layer": 2, "vocab_size": 37, "rms_norm": True, "residual_in_fp32": True,
    "pad_vocab_size_multiple": 8, "tie_embeddings": True, "ssm_cfg": {"layer": "Mamba2"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SURGERY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


@pytest.fixture
def model():
    shape = {"layer": "Mamba2", "d_state": 4, "headdim": 8}
    config = CONFIG | {"ssm_cfg": shape}
    made = hosts.adapter_for(config).build(config).eval()
    made.lm_head.weight.data.mul_(3)
    return made


@pytest.fixture
def base(tmp_path, model):
    """A checkpoint as its authors left it: tied weights twice in one pickle, shapes left to the tensors."""
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    return directory


class Trap:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_nothing_is_read_before_it_is_allowed(base, cache, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("read")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    for read in (unpickled, hosts.resolve):
        with pytest.raises(UsageError, match="--allow-pickle") as caught:
            read(base if read is unpickled else str(base))
        assert len(str(caught.value).splitlines()) == 1 and str(base) in str(caught.value)
    assert not cache.exists()
    with pickles_allowed(), pytest.raises(AssertionError, match="read"):
        unpickled(base)


def test_a_conversion_holds_the_pickles_tensors(base, cache, model):
    with pickles_allowed():
        directory = hosts.resolve(str(base))
    assert directory.parent == cache
    found = hosts.open_model(directory)
    state = model.state_dict()
    assert set(found.tensors) == set(state) - {"lm_head.weight"}  # tied: it is the embedding
    for name in found.tensors:
        assert torch.equal(found.read(name), state[name]) and found.read(name).dtype == state[name].dtype
    assert found.config["ssm_cfg"] == {"layer": "Mamba2", "d_state": 4, "headdim": 8}
    text = torch.randint(0, 37, (1, 20))
    with torch.no_grad():
        assert torch.equal(hosts.load_model(directory)(text).logits, model(text).logits)


def test_a_head_of_its_own_stays_beside_a_configuration_that_ties_it(base, cache, model):
    state = model.state_dict()
    state["lm_head.weight"] = torch.randn_like(state["lm_head.weight"])
    torch.save(state, base / "pytorch_model.bin")
    with pickles_allowed():
        directory = hosts.resolve(str(base))
    assert torch.equal(open_checkpoint(directory).read("lm_head.weight"), state["lm_head.weight"])
    loaded = hosts.load_model(directory).state_dict()
    for name in ("lm_head.weight", "backbone.embedding.weight"):
        assert torch.equal(loaded[name], state[name])


def test_it_is_converted_once_and_again_when_it_changes(base, cache, model, monkeypatch):
    with pickles_allowed():
        first = unpickled(base)
    with monkeypatch.context() as patched:
        patched.setattr(pickles, "read_pickle", lambda file: pytest.fail("read again"))
        assert unpickled(base) == first  # what was converted needs no word
    model.lm_head.weight.data.add_(1)
    torch.save(model.state_dict(), base / "pytorch_model.bin")
    os.utime(base / "pytorch_model.bin", ns=(1, 1))
    with pytest.raises(UsageError, match="--allow-pickle"):
        unpickled(base)
    with pickles_allowed():
        second = unpickled(base)
    assert second != first
    changed = open_checkpoint(second).read("backbone.embedding.weight")
    assert torch.equal(changed, model.state_dict()["backbone.embedding.weight"])


def test_what_is_put_beside_a_converted_pickle_later_counts(base, cache, monkeypatch):
    """Its authors' checkpoints come without a tokenizer: whoever is told so adds one, and is not told so again."""
    with pickles_allowed():
        directory = unpickled(base)
    (directory / "tokenizer.json").write_text("from elsewhere")
    monkeypatch.setattr(pickles, "read_pickle", lambda file: pytest.fail("read again"))
    assert unpickled(base) == directory and (directory / "tokenizer.json").read_text() == "from elsewhere"
    (base / "tokenizer.json").write_text("added")
    (base / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": 3}))
    assert unpickled(base) == directory
    assert (directory / "tokenizer.json").read_text() == "added"
    assert open_checkpoint(directory).config["eos_token_id"] == 3


def test_files_map_into_memory_and_legacy_files_are_read(base, model):
    read = pickles.read_pickle(base / "pytorch_model.bin")
    assert read["backbone.embedding.weight"].data_ptr() == read["lm_head.weight"].data_ptr()
    legacy = base / "legacy.bin"
    torch.save(model.state_dict(), legacy, _use_new_zipfile_serialization=False)
    for name, tensor in pickles.read_pickle(legacy).items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_pages_that_are_let_go_of_are_read_again(base, model):
    read = pickles.read_pickle(base / "pytorch_model.bin")
    pickles._forget(base / "pytorch_model.bin")
    for name, tensor in read.items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_half_precision_and_several_files(base, model):
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    names = sorted(set(tensors) - {"lm_head.weight"})
    parts = {"pytorch_model-00001-of-00002.bin": names[:7], "pytorch_model-00002-of-00002.bin": names[7:]}
    for file, part in parts.items():
        torch.save({name: tensors[name] for name in part}, base / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (base / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pickles_allowed():
        found = open_checkpoint(unpickled(base))
    assert len(found.shards) == 2
    assert all(torch.equal(found.read(name), tensors[name]) for name in names)
    (base / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(UsageError, match="names pytorch_model-00002-of-00002"):
        unpickled(base)


def test_code_is_refused_and_not_run(base, cache, tmp_path, model):
    trace = tmp_path / "ran"
    for save in (torch.save, lambda value, file: file.write_bytes(pickle.dumps(value))):
        save({**model.state_dict(), "trap": Trap(trace)}, base / "pytorch_model.bin")
        with pickles_allowed(), pytest.raises(UsageError, match=r"not read|damaged") as caught:
            unpickled(base)
        assert len(str(caught.value).splitlines()) <= 3
        assert not trace.exists() and not list(cache.glob("*"))


@pytest.mark.parametrize("change", ["cut", "empty", "list", "nested", "integers"])
def test_what_is_no_state_dict_is_one_short_message(base, change, model):
    file = base / "pytorch_model.bin"
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-300])
    elif change == "empty":
        file.write_bytes(b"")
    else:
        name = "backbone.norm_f.weight"
        integers = {**model.state_dict(), name: model.state_dict()[name].to(torch.int8)}
        torch.save({"list": [1], "nested": {"model": model.state_dict()}, "integers": integers}[change], file)
    with pickles_allowed(), pytest.raises(UsageError) as caught:
        unpickled(base)
    assert str(file) in str(caught.value) and len(str(caught.value).splitlines()) <= 3


def test_safetensors_win_over_a_pickle_beside_them(base, model):
    model.save_pretrained(base)
    (base / "pytorch_model.bin").write_bytes(b"not read")
    assert unpickled(base) == base
    assert "backbone.embedding.weight" in load_file(base / "model.safetensors")
