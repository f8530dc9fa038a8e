"""Files of every form: the same records whatever holds them, and one line for what is not read."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma

import pytest

from surgery.data.sources import sources
from surgery.data.texts import documents, load_text
from surgery.errors import UsageError

RECORDS = [
    {"text": 'A first, "quoted" line.\nAnd a second: é 漢字 😀', "id": 1},
    {"text": "NA", "id": 2},
    {"text": "[brackets] {and} more", "id": 3},
]
WANTED = [row["text"] for row in RECORDS]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def write(table):
    """Writes the records in the form that a path's name says."""

    def write(path):
        suffix = path.suffix.lower()
        if suffix in (".parquet", ".arrow"):
            table(path, RECORDS)
        elif suffix in (".csv", ".tsv"):
            with path.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.DictWriter(stream, ["text", "id"], delimiter="," if suffix == ".csv" else "\t")
                writer.writeheader()
                writer.writerows(RECORDS)
        else:
            path.write_text(lines(RECORDS), encoding="utf-8")
        return path

    return write


def compress(path, suffix):
    data = path.read_bytes()
    target = path.with_name(path.name + suffix)
    if suffix == ".zst":
        import pyarrow

        with pyarrow.output_stream(str(target), compression="zstd") as stream:
            stream.write(data)
    else:
        target.write_bytes({".gz": gzip, ".xz": lzma, ".bz2": bz2}[suffix].compress(data))
    path.unlink()
    return target


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL", "a.json", "a.csv", "a.tsv", "a.parquet", "a.arrow"])
def test_every_form_gives_the_same_documents(tmp_path, name, write):
    path = write(tmp_path / name)
    assert list(documents(str(path))) == WANTED
    for number, suffix in enumerate((".gz", ".xz", ".bz2", ".zst")):
        folder = tmp_path / str(number)
        folder.mkdir()
        copy = folder / name
        copy.write_bytes(path.read_bytes())
        assert list(documents(str(compress(copy, suffix)))) == WANTED


@pytest.mark.parametrize(
    "value",
    [
        RECORDS,
        {"data": RECORDS},
        {"version": 1, "rows": RECORDS},
        {"text": [row["text"] for row in RECORDS], "id": [1, 2, 3]},
        WANTED,
    ],
)
def test_a_json_file_holds_its_records_in_one_of_several_ways(tmp_path, value):
    path = tmp_path / "a.json"
    for indent in (None, 2):
        path.write_text(json.dumps(value, indent=indent))
        assert list(documents(str(path))) == WANTED


def test_one_object_is_one_record(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(RECORDS[0], indent=1))
    assert list(documents(str(path))) == WANTED[:1]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    (row,) = sources(str(path))[0].rows()
    assert list(row) == ["messages"]


def test_names_that_say_nothing_leave_it_to_the_content(tmp_path):
    path = tmp_path / "records"
    path.write_text(lines(RECORDS))
    assert list(documents(str(path))) == WANTED
    path.write_text(json.dumps(RECORDS))
    assert list(documents(str(path))) == WANTED
    path.write_text("{a brace} is no record\n")
    assert list(documents(str(path))) == ["{a brace} is no record\n"]
    named = tmp_path / "records.txt"
    for content in (lines(RECORDS), json.dumps(RECORDS, indent=1)):
        named.write_text(content)
        with pytest.raises(UsageError, match=r"records\.txt: is named as text and holds JSON records; name it \.json"):
            list(documents(str(named)))


def test_marks_and_halves_of_characters_do_no_harm(tmp_path):
    path = tmp_path / "a.jsonl"
    mark = b"\xef\xbb\xbf"
    rows = b'{"text": "one"}\n', b'{"text": "half \\ud83d a character"}\n', b'{"text": "\\ud83d\\ude00"}\n'
    path.write_bytes(mark + rows[0] + mark + rows[1] + rows[2])
    found = list(documents(str(path)))
    assert found == ["one", "half \ufffd a character", "😀"]
    text = tmp_path / "a.txt"
    text.write_bytes(b"\xef\xbb\xbfone two")
    assert load_text(str(text)).text == "one two"
    sheet = tmp_path / "a.csv"
    sheet.write_bytes(b"\xef\xbb\xbftext\none\n\n")
    assert list(documents(str(sheet))) == ["one"]
    joined = tmp_path / "joined.txt"
    joined.write_bytes(b"\xef\xbb\xbf\xef\xbb\xbfone\n\xef\xbb\xbftwo\r\n")
    assert list(documents(str(joined))) == ["one\ntwo\r\n"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": null}', r"a\.jsonl, record 2: 'text' is null, not text\n  drop the record"),
        ('{"text": 7}', r"a\.jsonl, record 2: 'text' is a number"),
        ('{"text": {"value": "deep"}}', r"record 2: 'text' is an object, not text\n.*column.*: text\.value"),
        ('{"text": ["a"]}', r"record 2: 'text' is a list"),
        ('{"body": "other"}', r"record 2 has no text under 'text', only body\n.*column.*: body"),
        ('["text"]', r"a\.jsonl, line 2: is a list; each line holds one object"),
        ('{"text": "cut', r"a\.jsonl, line 2: not JSON"),
        ("[" * 200_000, r"a\.jsonl, line 2: cannot be read \(nested too deep\)"),
        ('{"text": ' + "9" * 5000 + "}", r"a\.jsonl, line 2: cannot be read \(Exceeds"),
    ],
)
def test_a_bad_record_is_named_with_its_remedy(tmp_path, row, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + row + "\n")
    with pytest.raises(UsageError, match=message):
        list(documents(str(path)))


def test_a_column_names_the_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null, "content": "one", "deep": {"value": "two"}, "a.b": "three"}\n')
    for column, wanted in (("content", "one"), ("deep.value", "two"), ("a.b", "three")):
        assert list(documents(f"{path},column={column}")) == [wanted]
        assert list(documents({"path": str(path), "column": column})) == [wanted]
        assert list(documents([{"path": str(path), "column": column}])) == [wanted]
    odd = tmp_path / "odd,column=text.jsonl"
    odd.write_text('{"text": "a name with a comma"}\n')
    assert list(documents(str(odd))) == ["a name with a comma"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.docx", b"PK\x03\x04", ".docx files are not read; save its text"),
        ("a.pdf", b"%PDF-1.7", ".pdf files are not read"),
        ("a.zip", b"PK\x03\x04", ".zip files are not read; unpack it"),
        ("a.npy", b"\x93NUMPY", ".npy files are not read"),
        ("a.tar.gz", gzip.compress(b"x", mtime=0), ".tar files are not read; unpack it"),
        ("a.txt", "words".encode("utf-16"), "UTF-16 text"),
        ("a.txt", "words and more words".encode("utf-16-le"), "UTF-16 text"),
        ("a.txt", b"\x00\x01\x02binary\x00" * 50, "binary content"),
        ("a.txt", b"PAR1" + bytes(40), "holds parquet"),
        ("a.jsonl", gzip.compress(b'{"text": "x"}', mtime=0), "holds gzip"),
        ("a", b"<!DOCTYPE html><p>", "holds HTML"),
        ("a.jsonl.gz", b'{"text": "x"}', "cannot be read: Not a gzipped file"),
        ("a.jsonl.zst", b'{"text": "x"}', "cannot be read"),
        ("a.parquet", b"PAR1" + bytes(1000) + b"PAR1", "cannot be read as parquet"),
        ("a.arrow", b"ARROW1" + bytes(64), "cannot be read as arrow"),
        ("a.csv", b"text,id\none,1\ntwo,2,3,4\n", "cannot be read as csv"),
        ("a.csv", b"id,text\n1,one,more\n2,two\n", "line 2: cannot be read as csv: holds 3 cells"),
        ("a.csv", b"text,id\none,1\ntwo\n", "line 3: cannot be read as csv: holds 1 cells"),
        ("a.csv", b'id,text\n1,"cut o', "cannot be read as csv: unexpected end"),
        ("a.tsv", b'text\n"one" two\n', "line 2: cannot be read as tsv"),
        ("a.csv", b"", "has no header"),
        ("a.csv", b"text,text\na,b\n", "two columns are called 'text'"),
        ("a.json", b"7", "holds a number"),
        ("a.json", b'{"a": [{"text": "x"}], "b": [{"text": "y"}]}', "several lists of records: a, b"),
        ("a.json", b"[1, 2]", "record 1: is a number"),
        ("a.txt", b"fine\n\xe9\n", "not UTF-8 text (invalid continuation byte in line 2)"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as refusal:
        list(documents(str(path)))
    assert name in str(refusal.value) and words in str(refusal.value), refusal.value
    assert len(str(refusal.value).splitlines()) <= 2


def test_tables_as_people_write_them(tmp_path, table):
    numbered = tmp_path / "frame.csv"  # the rows' numbers have no name
    numbered.write_text(',text,id\n0,"one, two\n""three""",007\n\n1,NA,\n')
    assert list(documents(str(numbered))) == ['one, two\n"three"', "NA"]
    long = tmp_path / "long.tsv"
    long.write_text("id\ttext\n1\t" + "word " * 100_000 + "\n")
    assert [len(document) for document in documents(str(long))] == [500_000]
    table(tmp_path / "a.parquet", [{"text": "one"}])
    import pyarrow
    import pyarrow.parquet

    empty = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, tmp_path / "b.parquet")
    assert list(documents(f"{tmp_path}/*.parquet")) == ["one"]
    table(tmp_path / "c.parquet", [{"text": b"one"}])
    with pytest.raises(UsageError, match="'text' is bytes, not text"):
        list(documents(str(tmp_path / "c.parquet")))


def test_a_path_that_is_not_there_names_what_is_near(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(UsageError, match=r"no such file; .* \(near it: .*train\.jsonl\)"):
        sources(str(tmp_path / "trian.jsonl"))
    with pytest.raises(UsageError, match="no such file"):
        sources("tests/nothing-here")  # "tests" is a directory, so this is a path and no owner
    with pytest.raises(UsageError, match="is no path"):
        sources("a/" + "b" * 5000)


def test_no_server_hears_of_a_local_file(tmp_path, table, monkeypatch):
    path = tmp_path / "a.parquet"
    table(path, RECORDS)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    config = pytest.importorskip("datasets").config
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    for asking in ("datasets.load.get_session", "socket.getaddrinfo", "socket.socket.connect"):
        monkeypatch.setattr(asking, lambda *_, **__: pytest.fail("a server was asked"))
    assert list(documents(str(path))) == list(documents(str(tmp_path))) == WANTED
