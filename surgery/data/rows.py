"""The records of a local file: mappings from fields to values, whatever the file's form."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from surgery.data.forms import Form, form_of
from surgery.data.streams import MARK, Told, head_of, read_lines, read_whole
from surgery.errors import UsageError

Row = dict[str, Any]

LIST_FIELDS = "a .json file holds a list of records, one record a line, or one object with one list of records"
SEPARATORS = {"csv": ",", "tsv": "\t"}
LONGEST_CELL = 1 << 30  # characters; Python's own limit is 2^17
_SURROGATE = re.compile("[\ud800-\udfff]")


def form(path: Path) -> Form:
    """A file's form, by its name and its first bytes.

    Raises:
        UsageError: it is not there, cannot be read, or is of a form that is not read.
    """
    return form_of(path, head_of(path))


def file_rows(path: Path, told: Told | None = None) -> Iterator[Row]:
    """The records of a file that has records.

    Args:
        told: called now and then with the bytes read.

    Raises:
        UsageError: the file is damaged, or not what its name says; with the line where it has lines.
    """
    kind = form(path)
    if kind == "lines":
        yield from _json_lines(path, told)
    elif kind == "json":
        yield from _json(path, told)
    elif kind in SEPARATORS:
        yield from _cells(path, kind, told)
    else:
        from surgery.data.tables import table_rows

        yield from table_rows(path, kind)


def field(row: Mapping[str, Any], column: str) -> Any:
    """The value of a field; ``a.b`` is also the field b of the mapping a.

    Raises:
        KeyError: there is none.
    """
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(column)
        value = value[part]
    return value


def text_of(row: Mapping[str, Any], column: str, place: str) -> str:
    """A record's text.

    Raises:
        UsageError: there is no such field, or it holds no text; the remedy names the fields that hold some.
    """
    try:
        value = field(row, column)
    except KeyError:
        fields = shown_fields(row)
        raise UsageError(
            f"{place} has no text under {column!r}, only {fields}\n  {_name_the_field(row)}"
        ) from None
    if isinstance(value, str):
        return value.lstrip(MARK)
    remedy = _name_the_field(row) if _text_fields(row) else "drop the record, or write the field as text"
    raise UsageError(f"{place}: {column!r} is {shown_kind(value)}, not text\n  {remedy}")


def clean(text: str) -> str:
    """Replace lone surrogates, which no UTF-8 text holds and JSON lets through, by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def clean_values(value: Any) -> Any:
    """:func:`clean` for every text in a value of lists and mappings."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [clean_values(item) for item in value]
    if isinstance(value, dict):
        return {clean_values(key): clean_values(item) for key, item in value.items()}
    return value


def shown_kind(value: Any) -> str:
    """A value's kind, in words."""
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a text", bytes: "bytes"}
    names |= {bool: "true or false", type(None): "null"}
    return names.get(type(value)) or ("a number" if isinstance(value, (int, float)) else "a value of another kind")


def shown_fields(names: Iterable[Any]) -> str:
    """Names of fields, as an error shows them: not all of a hundred, and no control characters."""
    found = ["".join(c if c.isprintable() else "\ufffd" for c in str(name))[:60] for name in names]
    return ", ".join(found[:12]) + (", ..." if len(found) > 12 else "") if found else "none"


def _text_fields(row: Mapping[str, Any]) -> list[str]:
    """The fields that hold text, at most one level down."""
    found = [str(key) for key, value in row.items() if isinstance(value, str)]
    for key, value in row.items():
        if isinstance(value, Mapping):
            found += [f"{key}.{inner}" for inner, deep in value.items() if isinstance(deep, str)]
    return found


def _name_the_field(row: Mapping[str, Any]) -> str:
    fields = _text_fields(row)
    where = f": {shown_fields(fields)}" if fields else ""
    return f"name the field that holds the text, as {{path: ..., column: FIELD}} or PATH,column=FIELD{where}"


def _parse(text: str, place: str, remedy: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}: not JSON ({error.msg}); {remedy}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists without end
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error).split(";")[0]
        raise UsageError(f"{place}: cannot be read ({reason}); {remedy}") from None
    # escapes are the only way for a lone surrogate into decoded text
    return clean_values(value) if "\\ud" in text or "\\uD" in text else value


def _cells(path: Path, form: Form, told: Told | None) -> Iterator[Row]:
    """The rows of a CSV or TSV file. Cells are text as they stand: NA is no null, 007 no number."""
    csv.field_size_limit(LONGEST_CELL)
    separator = SEPARATORS[form]
    reader = csv.reader(read_lines(path, told), delimiter=separator, strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not cells:  # an empty line
                continue
            if header is None:
                header = _header(path, cells)
            elif len(cells) == len(header):
                yield dict(zip(header, cells, strict=True))
            else:
                raise UsageError(
                    f"{path}, line {reader.line_num}: cannot be read as {form}: holds {len(cells)} cells, and the "
                    f"header names {len(header)}\n  put a text that holds {separator!r} in double quotes"
                )
    except csv.Error as error:
        raise UsageError(
            f"{path}, line {reader.line_num}: cannot be read as {form}: {error}\n"
            "  a cell in double quotes ends with one, and doubles those inside"
        ) from None
    if header is None:
        raise UsageError(f"{path}: has no header; its first line names the columns")


def _header(path: Path, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if not any(names):
        raise UsageError(f"{path}: has no header; its first line names the columns")
    if doubled := sorted({name for name in names if name and names.count(name) > 1}):
        raise UsageError(f"{path}: two columns are called {doubled[0]!r}; rename one")
    return names


def _json_lines(path: Path, told: Told | None) -> Iterator[Row]:
    remedy = "each line holds one object"
    for number, line in enumerate(read_lines(path, told), 1):
        if not line.strip():
            continue
        row = _parse(line, f"{path}, line {number}", remedy)
        if not isinstance(row, dict):
            raise UsageError(
                f'{path}, line {number}: is {shown_kind(row)}; each line holds one object, as {{"text": ...}}'
            )
        yield row


def _json(path: Path, told: Told | None) -> Iterator[Row]:
    if _is_lines(path):
        yield from _json_lines(path, told)
        return
    value = _parse(read_whole(path), str(path), LIST_FIELDS)
    for number, row in enumerate(_records(path, value), 1):
        if isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, dict):
            raise UsageError(f"{path}, record {number}: is {shown_kind(row)}, not an object\n  {LIST_FIELDS}")
        yield row


def _records(path: Path, value: Any) -> list[Any]:
    """The list that a .json file is, or holds."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise UsageError(f"{path}: holds {shown_kind(value)}\n  {LIST_FIELDS}")
    lists = {key: item for key, item in value.items() if isinstance(item, list)}
    if lists.keys() == value.keys() and len(lists) > 0 and not _holds_records(lists):
        sizes = {len(item) for item in lists.values()}
        if len(sizes) == 1:  # a table by columns
            return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    records = _holds_records(lists)
    if len(records) > 1:
        raise UsageError(f"{path}: holds several lists of records: {shown_fields(records)}\n  {LIST_FIELDS}")
    # a conversation is a list of objects too, and is one record
    if records and not set(records) & {"messages", "conversations", "prompt", "completion"}:
        return lists[records[0]]
    return [value]


def _holds_records(lists: Mapping[str, list[Any]]) -> list[str]:
    return [key for key, item in lists.items() if item and all(isinstance(row, dict) for row in item)]


def _is_lines(path: Path) -> bool:
    """Whether a .json file holds one object a line: its first line is one, and another follows."""
    first = None
    for line in read_lines(path):
        if not line.strip():
            continue
        if first is not None:
            return line.lstrip().startswith("{")
        try:
            first = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(first, dict):
            return False
    return False
