"""The tokenizer of the small bases: byte-level BPE with 4096 entries, digits one by one.

Train it with ``python -m surgery.pretraining tokenizer --corpus DIRECTORY --output DIRECTORY``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"  # begins every document; the only special token, always id 0
MODEL_MAX_LENGTH = 1_000_000_000  # a recurrent model has no longest input

# One piece is a contraction's ending, a word, one digit, a run of symbols (each with at most one space before it) or
# white space. Single digits keep numbers of one length equally many tokens, which recall measurements rely on.
PIECES = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY):
    """A ``tokenizers.Tokenizer`` trained on ``texts``: bytes, merges, and END_OF_TEXT as id 0.

    Any text round-trips, since every byte is an entry.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer, directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` so that transformers' AutoTokenizer loads them."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MODEL_MAX_LENGTH,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(path: Path):
    """The ``tokenizers.Tokenizer`` in a directory."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path / "tokenizer.json"))


def encode(tokenizer, texts: Iterable[str]) -> list[np.ndarray]:
    """Each text as uint16 tokens."""
    return [np.asarray(encoding.ids, dtype=np.uint16) for encoding in tokenizer.encode_batch_fast(list(texts))]
