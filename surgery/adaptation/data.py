"""From a phase's data specification to its data set, and the checks of it that come before any training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from surgery.checkpoint.jsonfile import read_object
from surgery.checkpoint.staging import write_atomic
from surgery.data import checking, instruction
from surgery.data.instruction import InstructDataset
from surgery.data.packing import (
    PackedDataset,
    PackedTokens,
    read_tokens,
    require_window,
    tokenise,
    tokens_key,
    write_tokens,
)
from surgery.data.sources import Piece, Source, is_mixture, sources
from surgery.data.texts import describe
from surgery.errors import UsageError
from surgery.recipe import Phase, Recipe
from surgery.recipe.kinds import objective

SLACK = 1.1  # drawn sources take a little more or less than their share
COMMITS = "data.json"  # in the run directory: the commits of the hub's data sets that it reads


def phase_sources(recipe: Recipe, phase: Phase) -> list[tuple[str, float, list[Source]]]:
    """What a phase reads: name, weight and sources. A list of texts is one entry, a mixture one an item.

    Raises:
        UsageError: a missing file or another form.
    """
    spec = recipe.data_for(phase)
    root = recipe.path.parent
    if is_mixture(spec):
        entries = [(item, sources([item], root)) for item in spec]
        return [(describe(item["path"]), sum(s.weight for s in found), found) for item, found in entries]
    return [(describe(spec, "train"), 1.0, sources(spec, root))]


def training_documents(found: Iterable[Source]) -> Iterator[str]:
    """The documents of sources, one source after the other; of the bundled text only the part for training."""
    for source in found:
        yield from source.documents("train")


def training_pieces(found: Iterable[Source]) -> Iterator[Piece]:
    """:func:`training_documents`, the long ones in pieces."""
    for source in found:
        yield from source.pieces("train")


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
    entries = _at_commits(phase_sources(recipe, phase), folder)
    if objective(phase.kind).content == "instruct":
        rows = [row for _, _, found in entries for row in _examples(found, tokenizer)]
        padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
        return InstructDataset(rows, phase.context, length, seed, padding, entries[0][0])
    whole = sum(weight for _, weight, _ in entries)
    tokens: list[PackedTokens] = []
    for name, weight, found in entries:
        share = 1.0 if len(entries) == 1 else SLACK * weight / whole
        limit = int(share * length * phase.context) + 10 * phase.context + 1
        key = tokens_key(sources=found, tokenizer=checking.identity(tokenizer), limit=limit, rule=2)
        cached = read_tokens(folder / key, name, content, verify=verify, say=say)
        if cached is None:
            ids = tokenise(training_pieces(found), tokenizer, limit)
            write_tokens(folder / key, ids, vocabulary, content)
            cached = read_tokens(folder / key, name, content, verify=False)
        tokens.append(cached)
    return PackedDataset(tokens, [weight for _, weight, _ in entries], phase.context, length, seed)


def check(
    recipe: Recipe, index: int, tokenizer: Any, progress: checking.Progress | None = None
) -> list[checking.Checked]:
    """Read every record of the phase's local files, and find what :func:`build` would refuse.

    Args:
        progress: called with a stage, the bytes read and those of all files.

    Returns:
        Each source with its fingerprint.

    Raises:
        UsageError, JobError: as :func:`build`.
    """
    phase = recipe.phases[index]
    named = phase.data is not None or recipe.data is None
    with recipe.at(("phases", index, "data") if named else ("data",)):
        entries = phase_sources(recipe, phase)
        every = [source for _, _, found in entries for source in found]
        if objective(phase.kind).content == "instruct":
            checked = checking.check(every, "instruct", tokenizer, progress=progress)
            _require_fitting(phase, entries[0][0], every, checked)
            return checked
        checked = checking.check(every, "text", progress=progress)
        for name, _, found in entries:
            count = sum(map(len, tokenise(training_pieces(found), tokenizer, phase.context + 1)))
            require_window(name, count, phase.context)
        return checked


def _require_fitting(phase: Phase, name: str, found: list[Source], checked: list[checking.Checked]) -> None:
    shortest = min((one.shortest for one in checked if one.shortest is not None), default=0)
    if shortest > phase.context and all(source.kind != "hub" for source in found):
        raise UsageError(
            f"{name}: no example fits a context of {phase.context} tokens; raise context to {shortest} or more"
        )


def _examples(found: Iterable[Source], tokenizer: Any) -> Iterator[instruction.Example]:
    for source in found:
        column = source.options.get("column")
        for number, row in enumerate(source.rows("train"), 1):
            yield instruction.encode(row, f"{source.name}, record {number}", tokenizer, column)


def _at_commits(
    entries: list[tuple[str, float, list[Source]]], folder: Path
) -> list[tuple[str, float, list[Source]]]:
    """The entries with each data set of a hub fixed at its commit: the one it stood at when the run first read it."""
    if not any(source.kind == "hub" for _, _, found in entries for source in found):
        return entries
    from surgery.data.hub import hub_commit

    kept = folder.with_name(COMMITS)
    remedy = "put it back from a copy, or begin a new run"
    known: dict[str, str] = read_object(kept, remedy) if kept.is_file() else {}

    def fixed(source: Source) -> Source:
        if source.kind != "hub":
            return source
        key = f"{source.name}@{source.options.get('revision', 'main')}"
        if key not in known:
            known[key] = hub_commit(source.name, source.options.get("revision"))
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(kept, json.dumps(known, indent=1) + "\n")
        return replace(source, options={**source.options, "revision": known[key]})

    return [(name, weight, [fixed(source) for source in found]) for name, weight, found in entries]
