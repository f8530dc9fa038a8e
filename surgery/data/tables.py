"""Parquet, arrow and data set directories, through the ``datasets`` library, which is imported when one is read."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surgery.checkpoint.links import inside
from surgery.data.forms import COMPRESSIONS, READ, Form, is_data, is_records, refuse_by_name
from surgery.data.streams import open_bytes, reading
from surgery.errors import UsageError

SAVED = ("state.json", "dataset_info.json")  # what `save_to_disk` leaves beside a split's arrow files
SAVED_SPLITS = "dataset_dict.json"
CARD = "README.md"
CARDS_ASIDE = (".huggingface.yaml",)  # where `datasets` looks for a card's block alone
_MARKS = (".gitattributes", "dataset_infos.json")  # of a repository


def table_rows(path: Path, form: Form) -> Iterator[dict[str, Any]]:
    """The rows of a parquet or arrow file.

    Raises:
        UsageError: the file is damaged, or is another thing than its name says.
    """
    with _decompressed(path) as plain:
        try:
            yield from _load(plain, form)
        except Exception as error:  # the library raises its own, pyarrow's, pandas' and Python's errors here
            raise UsageError(f"{path}: cannot be read as {form}: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """What another library says, in one line."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(said[:2])[:200] or "no reason was given"


def is_saved(directory: Path) -> bool:
    """Whether a directory was written by ``save_to_disk``."""
    return (directory / SAVED_SPLITS).is_file() or all((directory / name).is_file() for name in SAVED)


def saved_files(directory: Path, split: str | None) -> list[Path]:
    """The arrow files of a directory that ``save_to_disk`` wrote, of one split where it holds several.

    Raises:
        UsageError: no such split, or no file.
    """
    if (directory / SAVED_SPLITS).is_file():
        splits = {child.name: child for child in sorted(directory.iterdir()) if is_saved(child)}
        directory = splits[pick_split(directory, list(splits), split)]
    elif split is not None:
        raise UsageError(f"{directory}: holds one split, not named ones; leave out split: {split}")
    files = sorted(directory.glob("*.arrow"))
    if not files:
        raise UsageError(f"{directory}: was written by save_to_disk, and its .arrow files are missing\n  save it again")
    return files


def is_repository(directory: Path) -> bool:
    """Whether a directory is a data set repository: data files beside a card or what else a hub keeps."""
    if not has_card(directory) and not any((directory / mark).is_file() for mark in _MARKS):
        return False
    return any(is_records(path) or path.suffix.lower() == ".txt" for path in directory.rglob("*"))


def has_card(directory: Path) -> bool:
    """Whether a directory's README is a card: it opens with a block of YAML."""
    card = directory / CARD
    if not card.is_file():
        return False
    with card.open("rb") as stream:
        return stream.read(8).removeprefix(b"\xef\xbb\xbf").startswith(b"---")


def repository_files(directory: Path, config: str | None, split: str | None) -> list[Path] | None:
    """The data files of one split of a data set repository on this machine, as its card or their names say; None where
    the card says nothing and ``datasets`` knows none of the names.

    Raises:
        UsageError: no such configuration or split, a form of repository that ``datasets`` does not read, or files that
            lie elsewhere.
    """
    configured = _check_card(directory)
    datasets = _datasets()
    try:
        builder = datasets.load_dataset_builder(str(directory.resolve()), config)
        found = {str(name): [str(file) for file in files] for name, files in (builder.config.data_files or {}).items()}
    except Exception as error:  # as in table_rows
        if isinstance(error, FileNotFoundError) and not configured and config is None:
            return None
        named = [path for path in sorted(directory.rglob("*")) if is_data(path) and path.name != CARD]
        files = f" ({named[0]})" if named else ""
        raise UsageError(
            f"{directory}: cannot be read as a data set repository: {reason_of(error)}\n"
            f"  name its files{files}, or the configuration ({directory},config=NAME)"
        ) from None
    if not any(found.values()):
        raise UsageError(f"{directory}: a data set repository without data files; download those too")
    files = [Path(file) for file in found[pick_split(directory, list(found), split)]]
    if absent := [file for file in files if not file.is_file()]:
        raise UsageError(f"{absent[0]}: the repository names it and it is not there; download it too")
    places = inside(directory)
    for file in files:
        if not any(file.resolve().is_relative_to(place) for place in places):
            raise _leads_out(directory, file)
        refuse_by_name(file)
        if not is_data(file):
            raise UsageError(f"{file}: {file.suffix or 'such'} files are not read\n  {READ}")
    return files


def _check_card(directory: Path) -> bool:
    """Whether a repository's card names its data files itself; ``datasets`` would follow it to any address.

    Raises:
        UsageError: the card names files that do not lie in the repository.
    """
    from huggingface_hub import metadata_load

    said: list[Any] = []
    for name in (CARD, *CARDS_ASIDE):
        try:
            said.append(metadata_load(directory / name) if (directory / name).is_file() else None)
        except Exception:  # not YAML: what loads the repository says so
            continue
    configs = [part["configs"] for part in said if isinstance(part, Mapping) and part.get("configs")]
    for text in _texts(configs):
        if "://" in text or "::" in text or text.startswith(("/", "~")) or ".." in Path(text).parts:
            raise _leads_out(directory, text)
    return bool(configs)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a value of lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _leads_out(directory: Path, file: str | Path) -> UsageError:
    return UsageError(
        f"{directory}: the data set's card or a link leads out of it, to {file}\n"
        "  if you trust that, name the file itself as the data"
    )


def pick_split(place: Path, splits: list[str], split: str | None) -> str:
    """The split asked for, otherwise ``train``, otherwise the only one.

    Raises:
        UsageError: there is none of that name, or no choice between several.
    """
    if split in splits:
        return split
    if split is None and ("train" in splits or len(splits) == 1):
        return "train" if "train" in splits else splits[0]
    problem = "several splits" if split is None else f"no split {split!r}"
    raise UsageError(f"{place}: {problem}; name one of them, as {place},split=NAME: {', '.join(splits)}")


def _datasets() -> Any:
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # what it would log is in the error it raises
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would tell a server of each file that is read here
    return datasets


def _load(path: Path, form: Form) -> Iterator[dict[str, Any]]:
    datasets = _datasets()
    if form == "parquet":
        import pyarrow.parquet

        if not pyarrow.parquet.read_metadata(path).num_rows:
            return  # one of several files; `datasets` fails on it
    yield from datasets.load_dataset(form, data_files=[str(path)], split="train", streaming=True)


@contextmanager
def _decompressed(path: Path) -> Iterator[Path]:
    """The file, or a copy of what it holds for the time of reading."""
    if path.suffix.lower() not in COMPRESSIONS:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="surgery-") as folder:
        plain = Path(folder) / path.stem
        with open_bytes(path) as (stream, _), reading(path), plain.open("wb") as target:
            shutil.copyfileobj(stream, target, 1 << 20)
        yield plain
