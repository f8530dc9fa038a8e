"""Pretrained checkpoints as they lie on disk: names, shapes and dtypes from the headers, one tensor at a time.

Nothing is read beyond the headers until :meth:`Checkpoint.read` is called, and every shard is checked against its own
header first, so that a missing or cut-off file is found before any work.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.companions import check_companions
from surgery.checkpoint.configuration import checked
from surgery.checkpoint.jsonfile import read_json, read_object
from surgery.checkpoint.layout import CONFIG, no_model
from surgery.checkpoint.links import check_links
from surgery.checkpoint.sizes import check_sizes
from surgery.errors import UsageError, UserError, plain_reason

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# bytes an element, by safetensors' names
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
}  # fmt: skip
SMALL_DTYPES = ("I8", "U8", "I4", "U4", "F4", "F6_E2M3", "F6_E3M2")
PACKED = (".qweight", ".qzeros", ".weight_packed")  # GPTQ and AWQ; compressed-tensors
DTYPE_NAMES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # torch's name -> safetensors'
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's header: dtype by safetensors' name (``BF16``), and the file that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Checkpoint:
    """A directory with ``config.json`` and safetensors weights, single or sharded. See :func:`open_checkpoint`."""

    directory: Path
    config: dict[str, Any]
    shards: tuple[str, ...]
    tensors: dict[str, TensorEntry]
    index_metadata: dict[str, Any]

    def read(self, name: str) -> Tensor:
        """Load one tensor to the CPU, in its own dtype."""
        from safetensors import safe_open

        with safe_open(self.directory / self.tensors[name].shard, framework="pt") as file:
            return file.get_tensor(name)

    @property
    def weight_bytes(self) -> int:
        """Size of the weight files."""
        return sum((self.directory / shard).stat().st_size for shard in self.shards)

    def largest_tensor(self) -> int:
        """Bytes of the largest tensor."""
        return max((entry.nbytes for entry in self.tensors.values()), default=0)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read ``config.json`` and every shard's header.

    Raises:
        UsageError: no directory, no or broken configuration, no safetensors weights (pickles are refused), a shard
            that is missing, cut off, or without a tensor that the index promises.
    """
    directory = Path(directory)
    config = raw_config(directory)
    check_companions(directory)
    names, metadata, promised = _shards(directory)
    tensors: dict[str, TensorEntry] = {}
    for shard in names:
        for entry in read_header(directory / shard):
            if entry.name in tensors:
                raise UsageError(
                    f"{directory / shard}: tensor {entry.name} is also in {tensors[entry.name].shard}\n"
                    "  the checkpoint is inconsistent: download it again"
                )
            tensors[entry.name] = entry
    astray = [name for name, shard in promised.items() if name not in tensors or tensors[name].shard != shard]
    if astray:
        raise UsageError(
            f"{directory / INDEX}: {_some(astray)} not in the shard that the index names\n"
            "  the index belongs to other files: download the checkpoint again"
        )
    check_unquantised(directory, tensors.values())
    shapes = {name: entry.shape for name, entry in tensors.items()}
    check_sizes(config, shapes, str(directory / CONFIG))
    return Checkpoint(directory, config, tuple(names), tensors, metadata)


@contextlib.contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Put into one line whatever a library says when it is given a configuration that makes no sense.

    Raises:
        UsageError: naming config.json.
    """
    try:
        yield
    except (UserError, MemoryError, OSError):
        raise
    except Exception as error:
        reason = plain_reason(error)
        raise UsageError(f"{directory / CONFIG}: cannot be used: {reason}\n  download the checkpoint again") from error


def shapes_there(directory: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a directory, of as many of its files as can be read."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with contextlib.suppress(UserError, OSError):
            found |= {entry.name: entry.shape for entry in read_header(file)}
    return found


def check_unquantised(directory: Path, entries: Iterable[TensorEntry]) -> None:
    """Refuse weights that were rounded to a few bits: a swap needs them as they were trained.

    Raises:
        UsageError: a tensor of 8 bits or fewer, or one that packs several weights into an integer.
    """
    for entry in entries:
        if entry.dtype in SMALL_DTYPES or entry.dtype.startswith("F8") or entry.name.endswith(PACKED):
            raise UsageError(
                f"{directory / entry.shard}: {entry.name}: has dtype {entry.dtype}, so the weights are quantised; use "
                "the model's unquantised weights"
            )


def raw_config(directory: Path) -> dict[str, Any]:
    """``config.json`` as a mapping.

    Raises:
        UsageError: the directory or the file is missing, or it is not a JSON object.
    """
    directory = Path(directory)
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise UsageError(f"{directory}: {found}\n  a model is a directory with config.json and safetensors weights")
    path = directory / CONFIG
    if not path.is_file():
        raise UsageError(no_model(directory))
    check_links(directory)
    return checked(read_object(path), path)


def _shards(directory: Path) -> tuple[list[str], dict[str, Any], dict[str, str]]:
    """Shard file names in order, the index's metadata, and its tensor -> shard map."""
    single, index = directory / SINGLE, directory / INDEX
    if not index.is_file():
        if single.is_file():
            return [SINGLE], {}, {}
        raise UsageError(_no_weights(directory))
    document = read_json(index)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise UsageError(f"{index}: has no weight_map from tensors to files\n  download the checkpoint again")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if outside:
        raise UsageError(f"{index}: {_some(outside)} not a safetensors file beside the index\n  do not trust this file")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise UsageError(
            f"{directory}: {len(missing)} of {len(names)} shards missing: {_some(missing)}\n"
            "  download the missing files again"
        )
    metadata = document.get("metadata")
    return names, metadata if isinstance(metadata, dict) else {}, weight_map


def _no_weights(directory: Path) -> str:
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        return (
            f"{directory}: the weights are pickled ({_some(pickles)}), and reading a pickle can run code hidden in it\n"
            "  if you trust them: add --allow-pickle (pytorch_model.bin alone, read as tensors and nothing else), or\n"
            "  load the model with its own library and save_pretrained() it, which writes safetensors"
        )
    return f"{directory}: holds no {SINGLE} and no {INDEX}\n  a model is a directory with config.json and safetensors"


def read_header(path: Path) -> list[TensorEntry]:
    """Names, dtypes and shapes in one safetensors file.

    Raises:
        UsageError: the file is cut off, damaged, or a placeholder of Git LFS.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # numpy's way in maps the file for reading alone; torch's asks for writable memory of the file's size
        with safe_open(path, framework="numpy") as file:
            entries = []
            for name in file.keys():  # noqa: SIM118 - the handle is not iterable
                view = file.get_slice(name)
                entries.append(TensorEntry(name, view.get_dtype(), tuple(view.get_shape()), path.name))
            return entries
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size if path.exists() else 0
        with path.open("rb") as file:
            start = file.read(20)
        if start.startswith(b"version https://git"):
            raise UsageError(f"{path}: is a Git LFS placeholder, not the weights\n  run: git lfs pull") from None
        raise UsageError(
            f"{path}: truncated or damaged: {size} bytes do not hold what the header says "
            f"({str(error).splitlines()[0][:120]})\n  download this file again"
        ) from None


def check_tensors(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], owner: str) -> None:
    """Compare a checkpoint with the names and shapes that its configuration implies.

    Raises:
        UsageError: a tensor is missing, has another shape, or is not of a floating-point type.
    """
    missing = [name for name in expected if name not in checkpoint.tensors]
    if missing:
        raise UsageError(
            f"{checkpoint.directory}: {len(missing)} tensors of {owner} are missing: {_some(missing)}\n"
            f"  config.json and the weights do not belong together, or a file is missing"
        )
    for name, shape in expected.items():
        entry = checkpoint.tensors[name]
        place = f"{checkpoint.directory / entry.shard}: {name}"
        if entry.shape != tuple(shape):
            raise UsageError(
                f"{place}: has shape {list(entry.shape)}, but config.json implies {list(shape)}\n"
                "  config.json and the weights do not belong together"
            )
        if entry.dtype not in FLOAT_DTYPES:
            raise UsageError(
                f"{place}: has dtype {entry.dtype}; only {', '.join(FLOAT_DTYPES)} are read\n"
                "  use the model's unquantised weights"
            )


def _some(names: list[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
