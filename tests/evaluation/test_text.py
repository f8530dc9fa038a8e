"""Data specifications: what they read, and the bytes that tokens stand for."""

from __future__ import annotations

import json
import lzma
import platform
from itertools import islice, pairwise

import pytest

from surgery.data.bundled import SHARED_PARAGRAPH
from surgery.data.sources import sources
from surgery.data.texts import describe, documents, load_text
from surgery.data.tokens import encode, require_context
from surgery.errors import JobError, UsageError

MIXED = "Ünïcode — 漢字 and 😀 or 🤷‍♀️ \n\n   spaced\t\ttabs  \nthe theory of the thing\n" * 12


def test_bundled_parts_meet_at_four_fifths():
    whole = load_text("bundled", "all").text
    train = load_text("bundled", "train").text
    assert whole.startswith(train)
    cut = int(0.8 * len(whole))
    assert cut <= len(train) <= whole.index("\n\n", cut) + 2
    heldout, rest = load_text("bundled", "heldout").text.split("\n\n"), whole[len(train) :].split("\n\n")
    assert set(heldout) <= set(rest)
    assert set(rest) - set(heldout) <= set(train.split("\n\n"))
    assert sum(map(len, heldout)) > 0.9 * sum(map(len, rest))


def test_heldout_quotes_nothing_of_the_training_part():
    train, heldout = (load_text("bundled", part).text.split("\n\n") for part in ("train", "heldout"))
    long = {paragraph for paragraph in heldout if len(paragraph) >= SHARED_PARAGRAPH}
    assert len(long) > 100
    assert not long & set(train)


def test_bundled_name_says_which_python_wrote_it():
    assert platform.python_version() in load_text("bundled").name
    assert "last 20%" in load_text("bundled").name
    assert "first 80%" in describe("bundled", "train")


def test_documents_of_a_compressed_file_end_at_separator_lines(tmp_path):
    path = tmp_path / "books.txt.xz"
    path.write_bytes(lzma.compress(b"one\ntwo\n\x1e\nthree\n\x1e\n\x1e\nfour \x1e four\n"))
    assert list(documents(str(path))) == ["one\ntwo\n", "three\n", "four \x1e four\n"]


def test_line_ends_are_kept_as_they_are(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"one\r\ntwo\r\n")
    assert load_text(str(path)).text == "one\r\ntwo\r\n"


def test_long_documents_come_in_pieces_that_join_again(tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.data.sources.PIECE", 50)
    path = tmp_path / "long.txt"
    path.write_text("".join(f"line {number} of a long text\n" for number in range(40)))
    (source,) = sources(path)
    pieces = list(source.pieces())
    assert len(pieces) > 5 and max(len(piece.text) for piece in pieces) < 100
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.text for piece in pieces) == path.read_text()
    assert list(documents(path)) == [path.read_text()]


def test_jsonl_and_directories(tmp_path):
    (tmp_path / "b.txt").write_text("from b")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "first"}) + "\n\n" + json.dumps({"text": "second"}) + "\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert list(documents(str(tmp_path))) == ["first", "second", "from b"]
    assert load_text([str(tmp_path / "b.txt"), str(tmp_path / "a.jsonl")]).text == "from b\n\nfirst\n\nsecond"


def test_relative_paths_are_found_beside_the_recipe(tmp_path):
    (tmp_path / "beside.txt").write_text("here")
    assert load_text("beside.txt", root=tmp_path).text == "here"


def test_mixture_keeps_the_shares_of_characters(tmp_path):
    (tmp_path / "short.jsonl").write_text("".join(json.dumps({"text": "s" * 10}) + "\n" for _ in range(7)))
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"text": "l" * 90}) + "\n" for _ in range(3)))
    shares = {"short": 3, "long": 1}
    mixture = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": share} for name, share in shares.items()]
    text = "".join(islice(documents(mixture, repeat=True), 2000))
    assert text.count("s") / len(text) == pytest.approx(0.75, abs=0.01)
    # without repetition it ends with the first source that ends
    assert "".join(documents(mixture)).count("s") == 70


def test_list_repeats_from_the_beginning(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert list(islice(documents([str(path)], repeat=True), 5)) == ["a", "b", "a", "b", "a"]


def test_hub_specifications():
    (source,) = sources("hub:owner/name,config=small,split=validation,column=content")
    assert (source.kind, source.name) == ("hub", "owner/name")
    assert source.options == {"config": "small", "split": "validation", "column": "content"}
    assert sources("owner/name")[0].kind == "hub"
    (source,) = sources([{"path": "owner/name", "split": "test", "weight": 2}])
    assert source.options == {"split": "test"}


def test_hub_data_set_offline_is_one_clear_error():
    with pytest.raises(JobError, match=r"owner/no-such-set .*cannot be read from the hub") as caught:
        load_text("owner/no-such-set")
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere/text.txt", "no such file"),
        ("./nowhere", "no such file"),
        ("a/b/c", "no such file"),
        ([], "list is empty"),
        (7, "neither"),
        ([{"weight": 1}], "an entry is"),
        ([{"path": "bundled", "wieght": 1}], "an entry is"),
        ([{"path": "bundled", "weight": -1}], "positive"),
        ([{"path": "bundled", "weight": "nan"}], "positive"),
        ("hub:name,spilt=x", "hub:NAME,config"),
    ],
)
def test_bad_specifications(spec, message):
    with pytest.raises(UsageError, match=message):
        sources(spec)


def test_bad_files_are_named(tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("café".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.txt: not UTF-8"):
        load_text(latin)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(UsageError, match=r"broken\.jsonl, line 2: not JSON"):
        load_text(broken)
    other = tmp_path / "other.jsonl"
    other.write_text('{"body": "x"}\n')
    with pytest.raises(UsageError, match=r"no text under 'text', only body"):
        load_text(other)
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n")
    with pytest.raises(UsageError, match="holds no text"):
        load_text(blank)
    with pytest.raises(UsageError, match="holds no text"):
        next(documents(blank, repeat=True))
    archive = tmp_path / "cut.txt.xz"
    archive.write_bytes(lzma.compress(b"text" * 1000)[:-8])
    with pytest.raises(UsageError, match=r"cut\.txt\.xz: cannot be read"):
        load_text(archive)


def test_bytes_are_those_of_the_decoded_text(tokenizer):
    tokens = encode(tokenizer, MIXED)
    assert tokenizer.decode(tokens.ids) == MIXED
    assert tokens.num_bytes() == len(MIXED.encode())
    for limit in range(1, 80):
        part = encode(tokenizer, MIXED, limit)
        decoded = tokenizer.decode(part.ids)
        assert MIXED.startswith(decoded)  # so no character is cut
        assert part.num_bytes() == len(decoded.encode())
        assert limit - 5 < len(part) <= limit


def test_bytes_add_up_over_pieces(tokenizer):
    tokens = encode(tokenizer, MIXED)
    cuts = [0, 1, 7, 50, len(tokens)]
    assert sum(tokens.num_bytes(a, b) for a, b in pairwise(cuts)) == len(MIXED.encode())
    assert tokens.num_bytes(5, 5) == 0


def test_limited_tokens_are_the_beginning_of_all_tokens(tokenizer):
    text = load_text("bundled").text
    limited, whole = encode(tokenizer, text, 500), encode(tokenizer, text)
    assert len(limited) == 500
    assert limited.ids.equal(whole.ids[:500])


def test_plain_tokenizer_reads_the_same(tokenizer):
    assert encode(tokenizer.backend_tokenizer, MIXED).ids.equal(encode(tokenizer, MIXED).ids)


def test_text_shorter_than_a_context_is_refused(tokenizer):
    tokens = encode(tokenizer, "short text")
    require_context(tokens, len(tokens))
    with pytest.raises(UsageError, match=rf"{len(tokens)} tokens are shorter than one context of {len(tokens) + 1}"):
        require_context(tokens, len(tokens) + 1)
