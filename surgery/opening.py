"""A recipe's base, opened; its headers, its weights and its tokenizer are checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.checkpoint.checksums import require_whole
from surgery.checkpoint.jsonfile import read_json
from surgery.checkpoint.reading import Checkpoint, check_tensors, explained
from surgery.checkpoint.values import check_values
from surgery.errors import JobError, UsageError, plain_reason
from surgery.recipe import Recipe

if TYPE_CHECKING:
    from surgery.hosts import HostAdapter


def open_base(
    recipe: Recipe, *, offline: bool | None = None, base: Path | None = None
) -> tuple[Checkpoint, HostAdapter]:
    """The recipe's base, its headers checked against its own configuration, and its weights for what is not finite.

    Raises:
        UsageError: naming the recipe's line and what is wrong with the base.
    """
    from surgery.hosts import adapter_for, open_model, resolve

    with recipe.at(("model",)):
        directory = base or resolve(recipe.model, recipe.revision, offline)
        require_whole(directory)
        checkpoint = open_model(directory)
        adapter = adapter_for(checkpoint.config)
        with explained(directory):
            expected = adapter.expected_tensors(checkpoint.config)
        check_tensors(checkpoint, expected, adapter.name)
        check_names(checkpoint, adapter)
        check_values(checkpoint, adapter.is_unused)
        check_tokenizer(checkpoint)
    return checkpoint, adapter


def swapped_before(checkpoint: Checkpoint, adapter: HostAdapter) -> Mapping[int, tuple[str, dict[str, Any]]]:
    """The layers that an earlier operation swapped, each with its rule and the rule's options."""
    from surgery.models.configuration import Swap

    if not checkpoint.config.get("surgery"):
        return {}
    return Swap.of(adapter.parse(checkpoint.config)).rules


def swappable(checkpoint: Checkpoint, adapter: HostAdapter) -> list[int]:
    """The layers that hold the host's own memory."""
    before = swapped_before(checkpoint, adapter)
    return [layer for layer in adapter.mixer_layers(checkpoint.config) if layer not in before]


def check_names(checkpoint: Checkpoint, adapter: HostAdapter) -> None:
    """Refuse a checkpoint that lacks a tensor of the model's, or holds one that the model has no place for.

    The model is loaded on the meta device: transformers goes through all names, renames and shapes, and reads no byte.

    Raises:
        UsageError: naming the tensors.
    """
    try:
        adapter.load(checkpoint.directory, placement={"device_map": "meta"})
    except JobError as error:
        raise UsageError(f"{error}\n  config.json and the weights do not belong together") from None


def base_tokenizer(recipe: Recipe, directory: Path) -> Any:
    """The tokenizer of the recipe's base, for the texts that the recipe names.

    Raises:
        UsageError: there is none, or it makes tokens that the model has not; the place named is the recipe's model, not
            one of its texts.
    """
    from surgery.evaluation.loading import load_tokenizer
    from surgery.hosts import recognise

    with recipe.at(("model",)):
        config, adapter = recognise(directory)
        return load_tokenizer(directory, adapter.parse(config).vocab_size)


def check_tokenizer(checkpoint: Checkpoint) -> None:
    """Refuse a tokenizer that makes ids the embeddings do not have.

    Raises:
        UsageError: with both sizes.
    """
    path = checkpoint.directory / "tokenizer.json"
    if not path.is_file():
        return
    try:
        document = read_json(path)
        vocabulary = document["model"]["vocab"]
        # a unigram model lists its tokens in order, others map them to ids
        largest = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary) - 1
        largest = max([largest, *(token["id"] for token in document.get("added_tokens") or ())])
        if isinstance(largest, bool) or not isinstance(largest, int):
            raise ValueError("an id is no whole number")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: not a tokenizer ({plain_reason(error)})\n  download this file again") from None
    from surgery.hosts import adapter_for

    size = adapter_for(checkpoint.config).parse(checkpoint.config).vocab_size
    if largest >= size:
        raise UsageError(
            f"{path}: makes token {largest}, but the model's vocabulary ends at {size - 1} (vocab_size {size})\n"
            "  the tokenizer belongs to another model: use the one that this model was trained with"
        )
