"""Pickled weights, turned into safetensors once, in a cache; everything else reads only those.

A pickle can hold code that runs when it is read. torch.load's ``weights_only`` refuses all but tensors and plain
values; still, nothing is read before the user has said that the file is to be trusted (``--allow-pickle``). What was
converted is known by the pickle's place, size and time, and needs no such word again. The small files beside it are
compared each time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.jsonfile import read_json, read_object
from surgery.checkpoint.links import check_links
from surgery.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
FORGET = 1 << 28  # bytes written between two times that the pickle's pages are let go
DONTNEED = 4  # madvise's
RECORD = "converted.json"  # beside the converted weights: where they come from
CONVERSION = "2"  # changes with what a conversion keeps, so that an earlier one is not taken for it
Ties = Callable[[Mapping[str, Any]], Mapping[str, str]]
_allowed: ContextVar[bool] = ContextVar("allow_pickle", default=False)


@contextmanager
def pickles_allowed(allowed: bool = True) -> Iterator[None]:
    """Within the block, pickled weights may be read: what ``--allow-pickle`` says."""
    token = _allowed.set(allowed)
    try:
        yield
    finally:
        _allowed.reset(token)


def pickles_are_allowed() -> bool:
    """Whether pickled weights may be read here."""
    return _allowed.get()


def unpickled(directory: Path, name: str | None = None, ties: Ties = lambda config: {}) -> Path:
    """The directory itself, or where its weights are pickled and there are no others, their conversion.

    Args:
        name: what the user calls the model, for messages.
        ties: a configuration -> tensors that repeat others under another name, and are left out where they do.

    Raises:
        UsageError: the pickle has not been allowed, or holds more than tensors, or is damaged.
    """
    if any(directory.glob("*.safetensors")):
        return directory
    check_links(directory)
    files = pickle_files(directory)
    if not files:
        return directory
    target = cache_folder() / _key(files)
    if (target / "config.json").is_file():
        _refresh(directory, target)
        return target
    if not _allowed.get():
        raise UsageError(
            f"{name or directory}: its weights are pickled ({files[0].name}), and reading a pickle can run code hidden "
            "in it; if you trust it, add --allow-pickle"
        )
    _convert(directory, files, target, ties)
    return target


def _refresh(directory: Path, target: Path) -> None:
    """Bring over what was added or edited beside the pickle since: a tokenizer above all."""
    from surgery.checkpoint.reading import CONFIG
    from surgery.checkpoint.staging import write_atomic
    from surgery.checkpoint.writing import companions

    for path in (Path(CONFIG), *companions(directory)):
        content = (directory / path).read_bytes() if (directory / path).is_file() else None
        if content is not None and not ((target / path).is_file() and (target / path).read_bytes() == content):
            (target / path).parent.mkdir(exist_ok=True)
            write_atomic(target / path, content)


def pickle_files(directory: Path) -> list[Path]:
    """The pickled weight files of a checkpoint directory, none where it has no such weights.

    Raises:
        UsageError: the index is damaged, or names files that are not there.
    """
    index = directory / INDEX
    if not index.is_file():
        return [directory / SINGLE] if (directory / SINGLE).is_file() else []
    document = read_json(index)
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise UsageError(f"{index}: has no weight_map from tensors to files\n  download the checkpoint again")
    files = [directory / name for name in sorted(set(names.values()))]
    for file in files:
        if file.parent != directory or file.suffix != ".bin" or not file.is_file():
            raise UsageError(f"{index}: names {file.name}, which is no weight file beside it\n  download it again")
    return files


def cache_folder() -> Path:
    """Where conversions are kept: SURGERY_CACHE, or beside the hub's cache."""
    root = os.environ.get("SURGERY_CACHE")
    if root:
        return Path(root).expanduser() / "converted"
    from huggingface_hub import constants

    return Path(os.environ.get("HF_HOME") or constants.HF_HOME).expanduser() / "surgery" / "converted"


def origin(directory: Path) -> dict[str, Any]:
    """What a conversion says of itself: ``from``, the directory of the pickle; nothing of another directory."""
    file = directory / RECORD
    if not file.is_file():
        return {}
    try:
        return read_object(file)
    except UsageError:
        return {}


def _key(files: list[Path]) -> str:
    parts = [CONVERSION]
    for file in files:
        status = file.resolve().stat()
        parts.append(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _convert(directory: Path, files: list[Path], target: Path, ties_of: Ties) -> None:
    from surgery.checkpoint.files import copy_file
    from surgery.checkpoint.reading import CONFIG, DTYPE_NAMES, TensorEntry, raw_config
    from surgery.checkpoint.reading import INDEX as SAFE_INDEX
    from surgery.checkpoint.reading import SINGLE as SAFE_SINGLE
    from surgery.checkpoint.staging import staged_directory
    from surgery.checkpoint.tensorfile import write_tensors
    from surgery.checkpoint.writing import companions, write_json

    ties = ties_of(raw_config(directory))
    needed = sum(file.stat().st_size for file in files) + 1_000_000
    try:
        with staged_directory(target, needed, wait=True) as staging:
            weight_map: dict[str, str] = {}
            for number, file in enumerate(files, 1):
                tensors = read_pickle(file)
                tensors = {name: tensor for name, tensor in tensors.items() if not _repeats(tensors, name, ties)}
                shard = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SAFE_SINGLE
                entries = []
                for name, tensor in tensors.items():
                    dtype = DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch."))
                    if dtype is None:
                        raise UsageError(
                            f"{file}: {name} is of type {tensor.dtype}; only {', '.join(DTYPE_NAMES)} are read\n"
                            "  use the model's unquantised weights"
                        )
                    entries.append(TensorEntry(name, dtype, tuple(tensor.shape), shard))
                    weight_map[name] = shard
                write_tensors(staging / shard, entries, tensors.__getitem__, _forgetting(file))
                del tensors
            if len(files) > 1:
                write_json(staging / SAFE_INDEX, {"metadata": {}, "weight_map": weight_map})
            for path in companions(directory):
                copy_file(directory / path, staging / path)
            write_json(staging / RECORD, {"from": str(directory), "files": [file.name for file in files]})
            copy_file(directory / CONFIG, staging / CONFIG)
    except (UsageError, OSError):
        if not (target / CONFIG).is_file():  # otherwise another process was faster
            raise


def _repeats(tensors: Mapping[str, Tensor], name: str, ties: Mapping[str, str]) -> bool:
    """Return whether a tensor is tied to another of the same file and holds the same values."""
    import torch

    other = tensors.get(ties.get(name, ""))
    return other is not None and other.shape == tensors[name].shape and torch.equal(other, tensors[name])


def _forgetting(file: Path) -> Callable[[int], None]:
    """A progress report that lets go of a mapped file's pages every 256 MB, so that what was written does not stay in
    this process's memory. The mapping stays valid: a page that is read again comes from the file again."""
    held = 0

    def written(count: int) -> None:
        nonlocal held
        held += count
        if held >= FORGET:
            held = 0
            _forget(file)

    return written


def _forget(file: Path) -> None:
    import ctypes

    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return  # not on Linux: the system takes the pages back when it needs them
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in lines:
        if line.endswith(f" {file.resolve()}"):  # pages of this file and of nothing else
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            madvise(start, end - start, DONTNEED)


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The tensors of a pickled state dict by name, mapped into memory where the file allows it.

    Raises:
        UsageError: it is damaged, or holds anything but tensors.
    """
    import pickle
    import warnings

    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                found = torch.load(file, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line), "")
        raise UsageError(
            f"{file}: holds more than tensors, and is not read{': ' + ' '.join(reason.split())[:160] if reason else ''}"
            "\n  it may be damaged, or hold code: get the weights as safetensors, or from a source you trust"
        ) from None
    except PermissionError:
        raise  # it names the file, and is no damage
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise UsageError(f"{file}: truncated or damaged ({reason})\n  download this file again") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()
    ):
        raise UsageError(f"{file}: is no state dict (a mapping from names to tensors)\n  give a model's weights")
    return found
