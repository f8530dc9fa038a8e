"""Directories, globs, data set repositories and what save_to_disk writes: the data files, and nothing beside them."""

from __future__ import annotations

import pytest

from surgery.data.sources import sources
from surgery.data.texts import documents
from surgery.errors import UsageError

CARD = "---\nlicense: mit\n---\n# Card\nThis card describes the columns.\n"


@pytest.fixture
def put(table):
    """Writes a file of one document, ``text``, or of one record with it and with the same in capitals as its body."""

    def put(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            table(path, [{"text": text, "body": text.upper()}])
        else:
            row = f'{{"text": "{text}", "body": "{text.upper()}"}}\n'
            path.write_text(row if path.suffix == ".jsonl" else text)

    return put


def test_a_downloaded_repository_is_its_data_files(tmp_path, put):
    (tmp_path / "README.md").write_text(CARD)
    put(tmp_path / "data/train-00000-of-00002.parquet", "one")
    put(tmp_path / "data/train-00001-of-00002.parquet", "two")
    put(tmp_path / "data/test-00000-of-00001.parquet", "never trained on")
    assert list(documents(str(tmp_path))) == ["one", "two"]
    assert list(documents(f"{tmp_path},split=test,column=body")) == ["NEVER TRAINED ON"]
    with pytest.raises(UsageError, match=r"no split 'validation'.*: train, test"):
        sources(f"{tmp_path},split=validation")


def test_a_card_names_the_files_of_its_configurations(tmp_path, put):
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/*.jsonl\n" for name in ("a", "b")
    )
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n# Card\n")
    put(tmp_path / "a/one.jsonl", "from a")
    put(tmp_path / "b/one.jsonl", "from b")
    assert list(documents({"path": str(tmp_path), "config": "b"})) == ["from b"]
    with pytest.raises(UsageError, match=r"cannot be read as a data set repository: .*\['a', 'b'\]"):
        sources(str(tmp_path))
    with pytest.raises(UsageError, match=r"cannot be read as a data set repository: .*'c' not found"):
        sources(f"{tmp_path},config=c")


def test_a_repository_without_its_data_says_so(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "data").mkdir()
    with pytest.raises(UsageError) as refusal:
        list(documents(str(tmp_path)))
    assert "Card" not in str(refusal.value) and str(tmp_path) in str(refusal.value)


def test_a_card_is_never_read_for_want_of_data(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"\x89PNG")
    with pytest.raises(UsageError, match=r"without a data file; it holds \.png"):
        sources(str(tmp_path))


def test_what_save_to_disk_wrote(tmp_path):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": ["a", "b"]})
    one.save_to_disk(tmp_path / "one")
    assert list(documents(str(tmp_path / "one"))) == ["a", "b"]
    splits = datasets.DatasetDict({"train": one, "test": datasets.Dataset.from_dict({"text": ["c"]})})
    splits.save_to_disk(tmp_path / "splits")
    assert list(documents(str(tmp_path / "splits"))) == ["a", "b"]
    assert list(documents(f"{tmp_path / 'splits'},split=test")) == ["c"]
    with pytest.raises(UsageError, match=r"no split 'dev'.*: test, train"):
        sources(f"{tmp_path / 'splits'},split=dev")
    with pytest.raises(UsageError, match="holds one split"):
        sources(f"{tmp_path / 'one'},split=train")


def test_a_plain_directory_is_read_in_order_without_what_describes_it(tmp_path, put):
    put(tmp_path / "b/second.txt", "second")
    put(tmp_path / "a.jsonl", "first")
    put(tmp_path / ".hidden/x.txt", "hidden")
    put(tmp_path / "README.md", "about these files")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert list(documents(str(tmp_path))) == ["first", "second"]
    alone = tmp_path / "alone"
    put(alone / "README.md", "the only text there is")
    assert list(documents(str(alone))) == ["the only text there is"]


def test_files_named_after_splits_are_not_mixed(tmp_path, put):
    for split in ("train", "test", "validation"):
        put(tmp_path / f"{split}.jsonl", split)
    assert list(documents(str(tmp_path))) == ["train"]
    assert list(documents(f"{tmp_path},split=validation")) == ["validation"]
    put(tmp_path / "latest.jsonl", "a name without a split")  # now names say nothing
    assert len(list(documents(str(tmp_path)))) == 4


def test_globs(tmp_path, put):
    for name in ("b.jsonl", "a.jsonl", "c/d.jsonl", "e.txt"):
        put(tmp_path / name, name)
    assert list(documents(str(tmp_path / "*.jsonl"))) == ["a.jsonl", "b.jsonl"]
    assert list(documents(f"{tmp_path}/**/*.jsonl,column=body")) == ["A.JSONL", "B.JSONL", "C/D.JSONL"]
    assert list(documents("e.tx?", root=tmp_path)) == ["e.txt"]
    with pytest.raises(UsageError, match="nothing matches"):
        sources(str(tmp_path / "*.parquet"))


def test_options_that_mean_nothing_are_refused(tmp_path, put):
    put(tmp_path / "a.jsonl", "x")
    with pytest.raises(UsageError, match="is one file and has no split"):
        sources(f"{tmp_path / 'a.jsonl'},split=train")
    with pytest.raises(UsageError, match="only a hub's data sets have revisions"):
        sources(f"{tmp_path / 'a.jsonl'},revision=main")
    with pytest.raises(UsageError, match="no card that names configurations"):
        sources(f"{tmp_path},config=a")
    with pytest.raises(UsageError, match="bundled: is one text"):
        sources({"path": "bundled", "column": "x"})


def test_a_directory_with_a_form_that_is_not_read_is_refused(tmp_path, put):
    put(tmp_path / "notes.txt", "notes")
    (tmp_path / "book.pdf").write_bytes(b"%PDF")
    with pytest.raises(UsageError, match=r"book\.pdf: \.pdf files are not read"):
        sources(str(tmp_path))
    (tmp_path / "book.pdf").unlink()
    (tmp_path / "notes.txt").unlink()
    with pytest.raises(UsageError, match="without a data file"):
        sources(str(tmp_path))


@pytest.mark.parametrize("place", ["/etc/passwd.txt", "../outside.txt", "https://example.com/a.jsonl", "zip://a::b.zip"])
@pytest.mark.parametrize("form", ["data_files: {}", "data_files:\n  - split: train\n    path: [{}]", "data_dir: {}"])
def test_a_card_cannot_lead_out_of_its_repository(tmp_path, put, monkeypatch, place, form):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("a server was asked"))
    repository = tmp_path / "repository"
    put(repository / "a.jsonl", "inside")
    put(tmp_path / "outside.txt", "outside")
    (repository / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  {form.format(place)}\n---\n")
    with pytest.raises(UsageError, match=r"card or a link leads out of it"):
        sources(str(repository))


def test_a_link_cannot_lead_out_of_a_repository_but_into_its_cache(tmp_path, put):
    repository = tmp_path / "repository"
    put(tmp_path / "outside.jsonl", "outside")
    put(repository / "test.jsonl", "inside")
    (repository / "README.md").write_text(CARD)
    (repository / "train.jsonl").symlink_to(tmp_path / "outside.jsonl")
    with pytest.raises(UsageError, match=r"link leads out of it, to .*train\.jsonl"):
        sources(str(repository))
    snapshot, blobs = tmp_path / "datasets--a--b/snapshots/0a", tmp_path / "datasets--a--b/blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    put(blobs / "one.jsonl", "cached")
    (blobs / "one.jsonl").rename(blobs / "3f")
    (snapshot / "README.md").write_text(CARD)
    (snapshot / "train.jsonl").symlink_to("../../blobs/3f")
    assert list(documents(str(snapshot))) == ["cached"]


def test_a_repository_is_read_whatever_its_names_are_written_like(tmp_path, put):
    (tmp_path / "README.md").write_text(CARD)
    put(tmp_path / "data/train.jsonl", "one")
    (tmp_path / "data/train.jsonl").rename(tmp_path / "data/train.JSONL")
    assert list(documents(str(tmp_path))) == ["one"]
    put(tmp_path / "text/book.txt", "a book")
    put(tmp_path / "text/LICENSE.txt", "all rights")
    (tmp_path / "text/README.md").write_text(CARD)
    assert list(documents(str(tmp_path / "text"))) == ["a book"]


def test_a_repository_of_another_form_is_refused_by_its_name(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "a.wav").write_bytes(b"RIFF")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.wav,hello\n")
    with pytest.raises(UsageError, match=r"a\.wav: \.wav files are not read"):
        sources(str(tmp_path))


def test_a_directory_that_cannot_be_read_is_one_error(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path / "locked"))

    monkeypatch.setattr("surgery.data.tables.is_saved", refused)
    with pytest.raises(UsageError, match=r"locked: cannot be read: Permission denied"):
        sources(str(tmp_path))
