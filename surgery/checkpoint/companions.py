"""Checks the values of the small JSON files beside config.json, whose names transformers' own errors leave out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surgery.checkpoint.jsonfile import AGAIN, read_object
from surgery.errors import UsageError

SMALL_FILES = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEXT, MAPPING, LIST, SWITCH = "a text", "a mapping", "a list", "true or false"
WHOLE, NUMBER, NOTHING = "a whole number", "a number", "null"

_TOKEN = (TEXT, MAPPING, NOTHING)
_TOKENIZER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")), _TOKEN),
    "additional_special_tokens": (LIST, MAPPING, NOTHING),
    "extra_special_tokens": (LIST, MAPPING, NOTHING),
    "added_tokens_decoder": (MAPPING, NOTHING),
    "auto_map": (MAPPING, LIST, NOTHING),
    "chat_template": (TEXT, LIST, MAPPING, NOTHING),
    "model_max_length": (NUMBER, NOTHING),
    "tokenizer_class": (TEXT, NOTHING),
}
_COUNTS = (
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences", "top_k",
    "bos_token_id", "pad_token_id", "no_repeat_ngram_size",
)  # fmt: skip
_MEASURES = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty", "epsilon_cutoff",
    "eta_cutoff", "max_time",
)  # fmt: skip
_KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "tokenizer_config.json": _TOKENIZER,
    "special_tokens_map.json": _TOKENIZER,
    "generation_config.json": {
        **dict.fromkeys(_COUNTS, (WHOLE, NOTHING)),
        **dict.fromkeys(_MEASURES, (NUMBER, NOTHING)),
        **dict.fromkeys(("do_sample", "use_cache"), (SWITCH, NOTHING)),
        "eos_token_id": (WHOLE, LIST, NOTHING),
    },
}


def check_companions(directory: Path) -> None:
    """Check the small JSON files of a checkpoint: that they are mappings, and what their known keys hold.

    Raises:
        UsageError: naming the file that is damaged, and the key.
    """
    for name in SMALL_FILES:
        path = directory / name
        if path.is_file():
            document = read_object(path)
            kinds = _KINDS.get(name, dict.fromkeys(document, (WHOLE,)))  # added tokens: text -> id
            for key, due in kinds.items():
                if key in document and not set(due) & set(_kinds_of(document[key])):
                    allowed = [kind for kind in due if kind != NOTHING]
                    found = next(iter(_kinds_of(document[key])))
                    raise UsageError(f"{path}: {key[:60]!r} is {found}, not {' or '.join(allowed)}\n  {AGAIN}")


def _kinds_of(value: Any) -> Iterator[str]:
    """What a JSON value is, in words; a whole number is a number too."""
    if value is None:
        yield NOTHING
    elif isinstance(value, bool):
        yield SWITCH
    elif isinstance(value, (int, float)):
        if isinstance(value, int) or value.is_integer():
            yield WHOLE
        yield NUMBER
    else:
        yield {str: TEXT, list: LIST, dict: MAPPING}[type(value)]
