"""JSON that is deep, huge, or of another type than expected is refused with its file's name."""

from __future__ import annotations

import json

import pytest

from surgery.checkpoint import jsonfile
from surgery.checkpoint.jsonfile import read_json
from surgery.checkpoint.manifest import read_manifest
from surgery.errors import UsageError

BROKEN = {
    "deep": "[" * 200_000,
    "levels": '{"a":' * 100 + "1" + "}" * 100,
    "number": '{"a":' + "9" * 6000 + "}",
    "list": "[]",
    "text": '"x"',
    "null": "null",
    "empty": "",
    "cut": '{"a": 1',
}
FILES = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "model.safetensors.index.json",
)  # fmt: skip


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("name", FILES)
def test_broken_json(name, content, base, refused):
    (base / name).write_text(content)
    refused(name, ways=1)


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_broken_tokenizer(content, base, refused):
    (base / "tokenizer.json").write_text(content)
    refused("tokenizer.json", ways=2)


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_broken_manifest(content, tmp_path):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=r"run\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": []}, {"model_type": {}}, {"text_config": "x"}, {"text_config": []}, {"ssm_cfg": 3},
        {"architectures": "x"}, {"architectures": [1]}, {"surgery": []}, {"surgery": {"layers": "x"}},
        {"layer_types": 5}, {"layer_types": [[]]}, {"quantization_config": "x"}, {"quantization_config": [1]},
        {"dtype": []}, {"torch_dtype": 7}, {"hidden_size": "16"}, {"num_hidden_layers": None}, {"num_heads": 0},
        {"num_heads": -1},
        {"vocab_size": {"": {}}}, {"hidden_size": [16]}, {"num_hidden_layers": 2.5},
        {"time_step_limit": "x"}, {"head_dim": 10**30}, {"eos_token_id": {"a": []}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_values_of_another_type(keys, edit, refused):
    edit(**keys)
    refused("config.json")


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("generation_config.json", "max_new_tokens", {}), ("generation_config.json", "temperature", "hot"),
        ("generation_config.json", "do_sample", 3), ("generation_config.json", "eos_token_id", 0.5),
        ("tokenizer_config.json", "eos_token", ["x"]), ("tokenizer_config.json", "bos_token", 7),
        ("tokenizer_config.json", "model_max_length", "x"), ("tokenizer_config.json", "chat_template", 5),
        ("tokenizer_config.json", "added_tokens_decoder", []), ("tokenizer_config.json", "tokenizer_class", ["a"]),
        ("special_tokens_map.json", "pad_token", True), ("added_tokens.json", "<|x|>", "7"),
        ("added_tokens.json", "<|x|>", {"b": 1}),
    ],
)  # fmt: skip
def test_values_of_another_type_beside_the_configuration(name, key, value, edit, refused):
    edit(name, **{key: value})
    refused(name, repr(key), ways=2)


def test_values_that_published_files_hold(edit):
    from surgery.checkpoint.companions import check_companions

    tokenizer = {
        "add_bos_token": True, "bos_token": None, "model_max_length": 1e30, "eos_token": {"content": "<|end|>"},
        "chat_template": [{"name": "default", "template": ""}], "additional_special_tokens": ["<|end|>"],
    }  # fmt: skip
    edit("generation_config.json", eos_token_id=[1, 2], temperature=1, top_p=None, max_new_tokens=5, do_sample=False)
    edit("special_tokens_map.json", eos_token="<|end|>")
    check_companions(edit("tokenizer_config.json", **tokenizer).parent)


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonfile, "MAX_BYTES", 1000)
    (tmp_path / "config.json").write_text(json.dumps(["x" * 1000]))
    with pytest.raises(UsageError, match=r"config\.json: is larger than"):
        read_json(tmp_path / "config.json")
