"""From a phase's data specification to its data set, and the checks of it that come before any training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from surgery.adaptation import instruction
from surgery.adaptation.instruction import InstructDataset
from surgery.adaptation.packing import (
    PackedDataset,
    PackedTokens,
    read_tokens,
    require_window,
    tokenise,
    tokens_key,
    write_tokens,
)
from surgery.errors import UsageError
from surgery.evaluation.text import Source, describe, sources
from surgery.recipe import Phase, Recipe

SLACK = 1.1  # drawn sources take a little more or less than their share
EARLY_RECORDS = 32  # of a hub data set that are read before the first step; files are read whole


def phase_sources(recipe: Recipe, phase: Phase) -> list[tuple[str, float, list[Source]]]:
    """What a phase reads: name, weight and sources. A list of texts is one entry, a mixture one an item.

    Raises:
        UsageError: a missing file or another form.
    """
    spec = recipe.data_for(phase)
    root = recipe.path.parent
    if isinstance(spec, (list, tuple)) and any(isinstance(item, Mapping) for item in spec):
        entries = [(item, sources([item], root)) for item in spec]
        return [(describe(item["path"]), sum(s.weight for s in found), found) for item, found in entries]
    return [(describe(spec, "train"), 1.0, sources(spec, root))]


def training_documents(found: Iterable[Source]) -> Iterator[str]:
    """The documents of sources, one source after the other; of the bundled text only the part for training."""
    for source in found:
        yield from source.documents("train")


def phase_seed(recipe: Recipe, index: int) -> int:
    """The seed of phase ``index``: each phase draws from its own."""
    return recipe.seed * 1_000_003 + index


def build(
    recipe: Recipe,
    index: int,
    length: int,
    tokenizer: Any,
    vocabulary: int,
    folder: Path,
    *,
    content: Sequence[str] = (),
    verify: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Any:
    """The data set of phase ``index`` with ``length`` items.

    Args:
        tokenizer: the model's; vocabulary: the model's size.
        folder: where tokens are kept while the run lasts, so that a resumed phase reads the same.
        content: SHA-256 of what the sources hold now; tokens made from other content are made again.
        verify: read the kept tokens through and compare their checksums. say: told where they are damaged.

    Raises:
        UsageError: text shorter than one context, records of another form, tokens the model has not.
        JobError: a data set that cannot be loaded.
    """
    phase = recipe.phases[index]
    seed = phase_seed(recipe, index)
    entries = phase_sources(recipe, phase)
    if phase.kind == "instruct":
        rows = [row for _, _, found in entries for row in _examples(found, tokenizer)]
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        return InstructDataset(rows, phase.context, length, seed, padding, entries[0][0])
    whole = sum(weight for _, weight, _ in entries)
    tokens: list[PackedTokens] = []
    for name, weight, found in entries:
        share = 1.0 if len(entries) == 1 else SLACK * weight / whole
        limit = int(share * length * phase.context) + 10 * phase.context + 1
        key = tokens_key(sources=found, tokenizer=_fingerprint(tokenizer), limit=limit)
        cached = read_tokens(folder / key, name, content, verify=verify, say=say)
        if cached is None:
            documents = training_documents(found)
            write_tokens(folder / key, tokenise(documents, tokenizer, limit), vocabulary, content)
            cached = read_tokens(folder / key, name, content, verify=False)
        tokens.append(cached)
    return PackedDataset(tokens, [weight for _, weight, _ in entries], phase.context, length, seed)


def check(recipe: Recipe, index: int, tokenizer: Any) -> None:
    """Find what :func:`build` would refuse, as far as the beginning of each text tells.

    Raises:
        UsageError, JobError: as :func:`build`.
    """
    phase = recipe.phases[index]
    named = phase.data is not None or recipe.data is None
    with recipe.at(("phases", index, "data") if named else ("data",)):
        entries = phase_sources(recipe, phase)
        if phase.kind == "instruct":
            _check_records(phase, entries, tokenizer)
            return
        for name, _, found in entries:
            count = sum(map(len, tokenise(training_documents(found), tokenizer, phase.context + 1)))
            require_window(name, count, phase.context)


def _check_records(phase: Phase, entries: list[tuple[str, float, list[Source]]], tokenizer: Any) -> None:
    searching = whole = True
    for _, _, found in entries:
        for source in found:
            whole = whole and source.kind != "hub"
            rows = instruction.records(source.rows("train"), source.name)
            for row, place in islice(rows, EARLY_RECORDS if source.kind == "hub" else None):
                # the form of every record, the length of as many as it takes to find one that fits
                instruction.pieces(row, place, tokenizer)
                if searching:
                    searching = len(instruction.encode(row, place, tokenizer).ids) > phase.context
    if searching and whole:
        raise UsageError(
            f"data: {entries[0][0]}: no example fits a context of {phase.context} tokens; raise context"
        )


def _examples(found: Iterable[Source], tokenizer: Any) -> Iterator[instruction.Example]:
    for source in found:
        for row, place in instruction.records(source.rows("train"), source.name):
            yield instruction.encode(row, place, tokenizer)


def _fingerprint(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
