"""From the name of a model, a run included, to a model and its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.checkpoint.companions import check_companions
from surgery.checkpoint.jsonfile import read_object
from surgery.checkpoint.layout import CONFIG, RUN_FILE, no_model
from surgery.errors import UsageError, plain_reason


@dataclass(frozen=True)
class Located:
    """Where a model lies.

    Attributes:
        name: as the user wrote it, for tables.
        path: its checkpoint directory.
        run: the run directory it came from, None for a plain model.
    """

    name: str
    path: Path
    run: Path | None = None

    @property
    def revision(self) -> str | None:
        """The commit of a model that came from a hub, None of any other."""
        from surgery.hosts import commit

        return commit(self.path)


def locate(model: str, revision: str | None = None) -> Located:
    """The checkpoint of ``bundled:NAME``, a directory, a run directory (its latest model) or a hub id.

    Raises:
        UsageError: there is no such model, the run holds none yet, or the directory is none.
    """
    from surgery.hosts import resolve

    try:
        path = resolve(model, revision)
    except UsageError:
        from surgery.recipe import shipped

        if model in shipped():
            remedy = "validate, apply and distill take recipes"
            raise UsageError(f"{model}: a shipped recipe, not a model; {remedy}") from None
        raise
    if (path / RUN_FILE).is_file():
        return Located(model, latest_model(path), path)
    if not (path / CONFIG).is_file():
        raise UsageError(no_model(path))
    return Located(model, path)


def latest_model(run: Path) -> Path:
    """The last finished phase's model of a run directory, or the applied checkpoint.

    Raises:
        UsageError: the run holds neither yet.
    """
    from surgery.checkpoint.manifest import read_manifest

    manifest = read_manifest(run)
    for number, phase in reversed(list(enumerate(manifest.phases, 1))):
        model = run / "phases" / f"{number:02d}-{phase.name}" / "model"
        if phase.status == "finished" and (model / "config.json").is_file():
            return model
    if (run / "applied" / "config.json").is_file():
        return run / "applied"
    raise UsageError(f"{run}: the run holds no model yet\n  run its phases with: surgery distill RECIPE --run {run}")


def load_tokenizer(path: Path, vocab_size: int | None = None) -> Any:
    """The tokenizer of a checkpoint directory.

    Args:
        vocab_size: of the model; a tokenizer that makes larger ids is refused.

    Raises:
        UsageError: there is none, it cannot be read, or it does not fit the model.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    from surgery.checkpoint.pickles import origin
    from surgery.checkpoint.remote_code import trusted

    noisy = logging.getLogger("transformers")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=trusted())
        except Exception:  # a model type that the Auto classes do not know; the file says enough
            if not (path / "tokenizer.json").is_file():
                if not any(path.glob("*.model")) and not any(path.glob("vocab.*")):
                    raise ValueError("no tokenizer files") from None
                raise
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        if not tokenizer.encode("text", add_special_tokens=False):
            # transformers makes an empty one of a model type's class where there are no files
            raise ValueError("no tokenizer files")
    except Exception as error:
        check_files(path)
        reason = plain_reason(error)
        place = origin(path).get("from", path)  # not the cache of what was converted
        remedy = _where_to_get(path, place)
        if _comes_as_code(path) and not trusted():
            reason = "it is code that comes with the model"
            remedy = "if you trust it, write trust_remote_code: true in the recipe and add --trust-remote-code"
        raise UsageError(f"{place}: no tokenizer can be read there ({reason})\n  {remedy}") from None
    finally:
        noisy.setLevel(level)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is not None and largest >= vocab_size:
        raise UsageError(
            f"{path}: the tokenizer makes ids up to {largest}, but the model's vocabulary holds {vocab_size}\n"
            "  use the tokenizer that belongs to the model"
        )
    return tokenizer


def check_files(path: Path) -> None:
    """Name the JSON file of a tokenizer that is damaged, if one is.

    Raises:
        UsageError: naming the file and what is wrong with it.
    """
    check_companions(path)
    for name in ("tokenizer.json", "vocab.json"):
        if (path / name).is_file():
            read_object(path / name)


def reads_alike(tokenizer: Any, other: Path) -> bool:
    """Whether the tokenizer's ids stand for the same tokens in that of the checkpoint ``other``, as far as both have
    them; a checkpoint without a tokenizer is taken for alike."""
    try:
        theirs = load_tokenizer(other).get_vocab()
    except UsageError:
        return True
    mine = {number: token for token, number in tokenizer.get_vocab().items()}
    return all(mine.get(number, token) == token for token, number in theirs.items())


def _where_to_get(path: Path, place: Path | str) -> str:
    """What to do for a checkpoint without a tokenizer."""
    from surgery.hosts.resolve import NEOX, NEOX_FILES, takes_neox

    try:
        known = takes_neox(read_object(path / CONFIG))
    except UsageError:
        known = False
    if known:
        return f"its authors use {NEOX}'s: hf download {NEOX} {' '.join(NEOX_FILES)} --local-dir {place}"
    return "copy the one that the model was trained with there (tokenizer.json); no option or recipe key names another"


def _comes_as_code(path: Path) -> bool:
    """Whether a checkpoint names code of its own for its tokenizer."""
    try:
        settings = read_object(path / "tokenizer_config.json")
        return bool(settings["auto_map"]["AutoTokenizer"])
    except (UsageError, KeyError, TypeError):
        return False


def check_loadable(located: Located) -> tuple[Any, Any, Any]:
    """Find what would keep a model from being loaded or computing: in its small files, its headers, its weights.

    Returns:
        Its adapter, its tokenizer, and its :class:`surgery.checkpoint.reading.Checkpoint`.

    Raises:
        UsageError: as :func:`load`.
    """
    from surgery.checkpoint.checksums import require_whole
    from surgery.checkpoint.values import check_values
    from surgery.hosts import open_model, recognise

    require_whole(located.path)
    config, adapter = recognise(located.path)
    tokenizer = load_tokenizer(located.path, adapter.parse(config).vocab_size)
    # names a damaged file, which loading all of them at once does not
    checkpoint = open_model(located.path)
    check_values(checkpoint, adapter.is_unused)
    return adapter, tokenizer, checkpoint


def load(
    located: Located,
    device: str,
    dtype: Any = None,
    *,
    offload: bool | None = False,
    window: int = 2048,
    say: Callable[[str], Any] | None = None,
) -> tuple[Any, Any]:
    """Model and tokenizer.

    Args:
        device: where to.
        dtype: a torch dtype; None stands for float32 on a CPU, where half precisions are slow, and elsewhere for the
            dtype the checkpoint is stored in.
        offload: whether blocks are read from the disk when they run; None: only if the model would not fit, and not
            if it fits on several GPUs together. Such a model runs forward only.
        window: tokens that are run at once, for that decision.
        say: called with a line about what is not as the configuration says, or why the model is not simply loaded.

    Raises:
        UsageError: an unsupported architecture, no fitting tokenizer, or a weight file that is missing or cut off.
        JobError: weights that do not fit the configuration.
    """
    import torch

    from surgery.checkpoint.fitting import placement
    from surgery.checkpoint.ties import own_head
    from surgery.hosts.streaming import load_streamed

    adapter, tokenizer, checkpoint = check_loadable(located)
    if dtype is None and device == "cpu":
        dtype = torch.float32
    own = own_head(checkpoint, adapter.ties(checkpoint.config))
    if own is not None and say is not None:
        say(own)
    where = "streamed" if offload else "whole"
    if offload is None:
        where, why = placement(checkpoint, device, dtype, window)
        if why and say is not None:
            say(f"{located.name}: {why}")
    if where == "streamed":
        return load_streamed(adapter, located.path, dtype=dtype, device=device), tokenizer
    spread = {"device_map": "auto"} if where == "spread" else None
    return adapter.load(located.path, dtype=dtype, device=device, placement=spread), tokenizer
