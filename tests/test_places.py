"""One rule says what is a path and what a hub may be asked about."""

from __future__ import annotations

import pytest

from surgery.places import is_hub_id, near, on_machine


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").mkdir()
    (tmp_path / "train.txt").write_text("text")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "data").mkdir()
    (tmp_path / "broken").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["owner/name", "state-spaces/mamba2-2.7b", "Qwen/Qwen3.5-0.8B", "a/b_c.d", "o/_n"])
def test_hub_ids(name):
    assert is_hub_id(name)


@pytest.mark.parametrize(
    "name",
    [
        "name", "./owner/name", "../name", "/owner/name", "~/name", "~nobody-here/name", "a/b/c", "a\\b", "owner/",
        "/name", "owner/name.txt", "owner/name.JSONL", "owner/data.csv.gz", "owner/model.safetensors", "models/mine",
        "models/mein", "owner/..", "owner/a..b", "owner/a--b", "owner/name.", "broken", "", "owner/na me", "öwner/name",
        "x" * 300, "x" * 300 + "/y.txt", "a\0/b",
    ],
)  # fmt: skip
def test_paths(name):
    assert not is_hub_id(name)


def test_a_path_beside_the_recipe(here):
    assert is_hub_id("data/name") and not is_hub_id("data/name", here / "beside")
    assert on_machine("data", here / "beside") == here / "beside" / "data"
    assert on_machine("absent", here / "beside") is None


def test_near_names(here):
    assert near("trian.txt") == " (near it: train.txt)"
    assert "models/mine" in near("models/mien")
    assert near("modls/mine") == " (there is no directory modls; near it: models)"
    assert near(str(here / "trian.txt")) == f" (near it: {here / 'train.txt'})"
    assert near("nothing like it") == "" and near("x" * 300) == ""


def test_nothing_is_asked_about_a_path(monkeypatch):
    import huggingface_hub

    from surgery.data.sources import sources
    from surgery.errors import UsageError
    from surgery.hosts import resolve

    def asked(*_, **__):
        raise AssertionError("a hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)
    for name in ("models/mein", "owner/name.txt", "a/b/c", "~/absent"):
        with pytest.raises(UsageError, match="no such directory"):
            resolve(name)
        with pytest.raises(UsageError, match="no such file"):
            sources(name)
