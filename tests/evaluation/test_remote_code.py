"""A tokenizer's own code runs if the recipe and the command line both say so, and in no other case."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext

import pytest
from typer.testing import CliRunner

from surgery.checkpoint.remote_code import code_allowed, recipe_says, trusted
from surgery.errors import UsageError
from surgery.evaluation.loading import load_tokenizer
from surgery.hosts import resolve

CODE = '''
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Path({marker!r}).touch()


class OwnTokenizer(PreTrainedTokenizerFast):
    """Bytes."""

    def __init__(self, **kwargs):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        own = Tokenizer(models.BPE(vocab={{token: index for index, token in enumerate(alphabet)}}, merges=[]))
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        own.decoder = decoders.ByteLevel()
        super().__init__(tokenizer_object=own)
'''


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A model whose tokenizer is a file of code, which leaves a mark when it is run."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tmp_path / "base"
    shutil.copytree(resolve("bundled:tiny-mamba2"), directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (directory / name).unlink(missing_ok=True)
    (directory / "tokenization_own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    place = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": place}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("command", [False, True])
@pytest.mark.parametrize("recipe", [False, True])
def test_both_must_say_so(base, tmp_path, command, recipe):
    with code_allowed() if command else nullcontext():
        recipe_says(recipe)
        assert trusted() == (command and recipe)
        if trusted():
            assert load_tokenizer(base).decode(load_tokenizer(base).encode("own bytes")) == "own bytes"
        else:
            with pytest.raises(UsageError, match=r"comes with the model.*\n.*recipe and add --trust-remote-code"):
                load_tokenizer(base)
        assert (tmp_path / "ran").exists() == trusted()
    recipe_says(False)
    assert not trusted()


@pytest.mark.parametrize(("flag", "key"), [(True, True), (True, False), (False, True)])
def test_apply(base, tmp_path, flag, key):
    from surgery import cli

    cli._register()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {base}\nlayers: [1]\nmemory: {{rule: palimpsa}}\n" + ("trust_remote_code: true\n" if key else "")
        + "evaluation: {text: " + str(tmp_path / "text.txt") + "}\n"
    )
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question " * 100)
    output = tmp_path / "out"
    arguments = ["apply", str(recipe), "--output", str(output), *(["--trust-remote-code"] if flag else [])]
    result = CliRunner().invoke(cli.app, arguments)
    assert (result.exit_code == 0) == (flag and key) == (tmp_path / "ran").exists() == output.exists()
    if output.exists():
        assert (output / "tokenization_own.py").read_bytes() == (base / "tokenization_own.py").read_bytes()
    else:
        assert "trust_remote_code" in str(result.exception)
    assert not trusted()
