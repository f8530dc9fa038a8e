"""``surgery validate`` and ``surgery recipes``: what is checked, what is said to be unchecked, files verbatim."""

from __future__ import annotations

import json

import pytest

from surgery.recipe import load_recipe, shipped


def test_list_of_recipes(surgery):
    result = surgery("recipes")
    assert result.code == 0 and result.err == ""
    lines = result.out.splitlines()
    for name in shipped():
        (line,) = [line for line in lines if line.split()[0] == name]
        assert load_recipe(name).memory.rule in line
        assert load_recipe(name).layers_text in line


@pytest.mark.parametrize("name", list(shipped()))
def test_show_is_verbatim(name, surgery):
    result = surgery("recipes", "show", name)
    assert result.code == 0 and result.err == ""
    assert result.out.encode() == shipped()[name].read_bytes()


@pytest.mark.parametrize("name", list(shipped()))
def test_shipped_recipes_validate(name, surgery):
    from surgery.hosts import bundled

    recipe = load_recipe(name)
    if recipe.bundled and recipe.model.removeprefix("bundled:") not in bundled():
        pytest.skip(f"{recipe.model} is not there")
    result = surgery("validate", name, "--json", "-")
    assert result.code == 0, result.err
    model = next(check for check in result.json["checks"] if check["what"] == "model")
    assert model["checked"] == recipe.bundled
    assert [phase["phase"] for phase in result.json["phases"]] == [phase.label for phase in recipe.phases]


def test_base_and_texts_at_hand(bases, surgery, write_recipe, tmp_path):
    (tmp_path / "mine.txt").write_text("long enough, for all I know. " * 100)
    path = write_recipe(
        f"model: {bases['mamba2']}\nlayers: {{top: 2}}\nmemory: {{rule: palimpsa}}\ndata: mine.txt\n"
        "phases:\n  - {kind: hidden, tokens: 20k, context: 256, batch: 2k}\n"
        "  - {kind: instruct, tokens: 20k, context: 256, batch: 2k, data: 'hub:owner/name'}\n"
    )
    result = surgery("validate", path, "--json", "-")  # the text is found beside the recipe
    assert result.code == 0, result.err
    checks = result.json["checks"]
    assert [(check["what"], check["checked"]) for check in checks] == [
        ("recipe", True), ("model", True), ("inspection", True), ("text", True), ("text", False), ("text", True),
        ("recall", True),
    ]  # fmt: skip
    assert "layers 0-3" in checks[1]["detail"] and "top 2 by mean" in checks[1]["detail"]
    first = result.json["phases"][0]
    assert (first["tokens"], first["steps"], first["dose"]) == ("20k", 10, "0 to 1 over 50%")
    shown = surgery("validate", path)
    assert shown.code == 0 and shown.err == ""
    for word in ("not checked", "hub:owner/name", "0 to 1 over 50%", "instruct"):
        assert word in shown.out


def test_json_to_a_file(surgery, write_recipe, bases, tmp_path):
    path = write_recipe(f"model: {bases['mamba2']}\nlayers: [0]\nmemory: {{rule: host}}\n")
    result = surgery("validate", path, "--json", tmp_path / "result.json", "--set", "seed=7")
    assert result.code == 0 and "ok" in result.out
    assert json.loads((tmp_path / "result.json").read_text())["overrides"] == ["seed=7"]


def test_help_has_examples(surgery):
    for command in (("validate",), ("apply",), ("recipes",), ("recipes", "show")):
        result = surgery(*command, "--help")
        assert result.code == 0
        assert f"surgery {' '.join(command)}" in result.out
        assert "Example" in result.out
