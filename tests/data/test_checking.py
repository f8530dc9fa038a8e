"""Reading every record before the first step: what is found, what is kept, what is not imported for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest

from surgery.data import checking, hub, instruction
from surgery.data.sources import Source, sources
from surgery.data.texts import load_text
from surgery.errors import JobError, UsageError


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("SURGERY_CACHE", str(tmp_path / "cache"))
    checking._sha256.cache_clear()
    hub._commit.cache_clear()


@pytest.fixture
def readings(monkeypatch):
    """The names of the sources that were read through."""
    names = []
    read = Source.rows
    monkeypatch.setattr(Source, "rows", lambda self, *args: names.append(self.name) or read(self, *args))
    return names


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sources(str(path))


def test_the_last_record_is_read(tmp_path, bytewise):
    path = tmp_path / "a.jsonl"
    found = lines(path, *[{"text": "fine"}] * 2000, {"text": None})
    with pytest.raises(UsageError, match="record 2001: 'text' is null"):
        checking.check(found, "text")
    found = lines(path, *[{"prompt": "a", "answer": "b"}] * 2000, {"prompt": "a"})
    for tokenizer in (None, bytewise):
        with pytest.raises(UsageError, match="record 2001: no answer"):
            checking.check(found, "instruct", tokenizer)


def test_what_was_found(tmp_path, bytewise):
    (text,) = checking.check(lines(tmp_path / "a.jsonl", {"text": "one"}, {"text": " "}, {"text": "two"}), "text")
    assert (text.name, text.records, text.shortest) == (str(tmp_path / "a.jsonl"), 2, None)
    talks = lines(tmp_path / "b.jsonl", {"prompt": "abc", "answer": "d"}, {"prompt": "a", "answer": "b"})
    (talk,) = checking.check(talks, "instruct", bytewise)
    assert (talk.records, talk.shortest) == (2, 3)
    with pytest.raises(UsageError, match="holds no text"):
        checking.check(lines(tmp_path / "c.jsonl", {"text": " "}), "text")


def test_a_file_is_read_once_a_fingerprint(tmp_path, readings, bytewise):
    path = tmp_path / "a.jsonl"
    found = lines(path, {"text": "one", "prompt": "a", "answer": "b"})
    first = checking.check(found, "text")
    assert checking.check(found, "text") == first and readings == [str(path)]
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(path.read_bytes())
    assert checking.check(sources(str(moved)), "text")[0].fingerprint == first[0].fingerprint
    assert len(readings) == 1
    # another question, another tokenizer, another field and another content are read again
    checking.check(found, "instruct", bytewise)
    bytewise.chat_template, before = "{% for m in messages %}{{ m.content }}{% endfor %}", bytewise.chat_template
    checking.check(found, "instruct", bytewise)
    bytewise.chat_template = before
    checking.check(sources(f"{path},column=prompt"), "text")
    assert len(readings) == 4
    again = checking.check(lines(path, {"text": "another one"}), "text")
    assert len(readings) == 5 and again[0].fingerprint != first[0].fingerprint


def test_what_failed_is_not_kept(tmp_path):
    found = lines(tmp_path / "a.jsonl", {"text": None})
    for _ in range(2):
        with pytest.raises(UsageError, match="is null"):
            checking.check(found, "text")


def test_damaged_notes_are_read_again(tmp_path, readings):
    found = lines(tmp_path / "a.jsonl", {"text": "one"})
    first = checking.check(found, "text")
    (note,) = (tmp_path / "cache" / "checked").iterdir()
    for damage in ("", "[]", '{"records": "x"}'):
        note.write_text(damage)
        assert checking.check(found, "text") == first
    assert len(readings) == 4


def test_a_place_that_takes_no_notes_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SURGERY_CACHE", str(tmp_path / "file"))
    assert checking.check(lines(tmp_path / "a.jsonl", {"text": "one"}), "text")[0].records == 1


def test_progress_goes_over_all_files(tmp_path):
    seen = []
    found = [*lines(tmp_path / "a.jsonl", *[{"text": "x" * 100}] * 3000), *lines(tmp_path / "b.jsonl", {"text": "y"})]
    checking.check(found, "text", progress=lambda *what: seen.append(what))
    total = sum(os.path.getsize(source.name) for source in found)
    assert {(stage, whole) for stage, _, whole in seen} == {(checking.STAGE, total)}
    done = [count for _, count, _ in seen]
    assert done == sorted(done) and done[-1] == total and len(set(done)) > 3


class FakeHub:
    """A hub with one data set, whose branch moves when it is told to."""

    def __init__(self, monkeypatch, rows):
        self.rows, self.head, self.asked, self.loaded = rows, "a" * 40, 0, []
        monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", self.info)
        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=self.load))

    def info(self, name, *, revision=None, timeout=None):
        self.asked += 1
        return types.SimpleNamespace(sha=self.head if revision in (None, "main") else revision)

    def load(self, name, config=None, *, split, revision, streaming):
        assert streaming
        self.loaded.append((name, config, split, revision))
        return iter(self.rows)


def test_a_stream_is_fixed_by_its_commit(monkeypatch):
    fake = FakeHub(monkeypatch, [{"text": str(number)} for number in range(100)])
    (source,) = sources("hub:owner/name,config=small,split=dev,revision=main")
    (checked,) = checking.check([source], "text")
    assert checked.fingerprint == "commit:" + "a" * 40 and checked.records == checking.EARLY_RECORDS
    fake.head = "b" * 40  # what this process reads stays of one commit
    assert len(list(source.documents())) == 100 and fake.asked == 1
    assert fake.loaded == [("owner/name", "small", "dev", "a" * 40)] * 2
    assert load_text("owner/name", limit=20).name == "owner/name (commit " + "b" * 40 + ")"  # of main, asked for now


def test_a_stream_is_checked_as_it_is_read(monkeypatch, bytewise):
    FakeHub(monkeypatch, [{"text": "fine"}] * 50 + [{"text": None}])
    (source,) = sources("owner/name")
    checking.check([source], "text")
    with pytest.raises(UsageError, match="owner/name, record 51: 'text' is null"):
        list(source.documents())
    FakeHub(monkeypatch, [{"question": "?"}])
    with pytest.raises(UsageError, match="owner/name, record 1: found the fields question"):
        checking.check([source], "instruct", bytewise)


def test_a_hub_that_does_not_answer_is_one_error(monkeypatch):
    FakeHub(monkeypatch, [])
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *a, **k: 1 / 0)
    with pytest.raises(JobError, match=r"data set owner/name cannot be read from the hub: division by zero"):
        checking.check(sources("owner/name"), "text")


def test_lines_and_text_need_no_datasets(tmp_path):
    (tmp_path / "a.txt").write_text("a text to read\n" * 50)
    (tmp_path / "b.jsonl").write_text('{"text": "a text to read"}\n' * 50)
    (tmp_path / "c.json").write_text(json.dumps([{"text": "a text to read"}] * 50))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "d.jsonl").write_text('{"text": "a text to read"}\n' * 50)
    script = (
        "import sys; sys.modules['datasets'] = None\n"  # importing it is an error from here on
        "from pathlib import Path\n"
        "from surgery.data import checking\n"
        "from surgery.data.packing import read_tokens, tokenise, write_tokens\n"
        "from surgery.data.sources import sources\n"
        "from surgery.data.texts import load_text\n"
        "from surgery.hosts import resolve\n"
        "from surgery.evaluation.loading import load_tokenizer\n"
        "tokenizer = load_tokenizer(resolve('bundled:tiny-mamba2'))\n"
        "for name in ('bundled', 'a.txt', 'b.jsonl', 'c.json', 'folder', '*.jsonl'):\n"
        "    found = sources(name)\n"
        "    checking.check(found, 'text')\n"
        "    load_text(name)\n"
        "    write_tokens(Path('kept'), tokenise(found[0].pieces(), tokenizer, 100), 4096)\n"
        "    assert len(read_tokens(Path('kept'), name).ids) == 100\n"
        "print('read')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "read", done.stderr


def test_encoding_and_checking_agree_on_what_is_read(tmp_path, bytewise):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = lines(tmp_path / "a.jsonl", {"talk": talk})
    with pytest.raises(UsageError, match="found the fields talk"):
        checking.check(found, "instruct", bytewise)
    (named,) = sources(f"{tmp_path / 'a.jsonl'},column=talk")
    (checked,) = checking.check([named], "instruct", bytewise)
    (row,) = named.rows()
    assert checked.shortest == len(instruction.encode(row, "x", bytewise, "talk").ids)
