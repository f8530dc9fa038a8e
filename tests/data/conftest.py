"""Tokenizers as published ones are, trained in memory on a few sentences."""

from __future__ import annotations

import json

import pytest

SENTENCES = (
    "The theory of the thing is that nothing is the other thing, and the rest is there.",
    "One of the special magic numbers for early morning is: 7654321.",
    "What is the special magic number? The special magic number is: 12.",
    "Instruction: add these two. Answer: yes, no, three and forty words in a row.",
)


def _llama(metaspace: bool):
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    fallback = [f"<0x{number:02X}>" for number in range(256)]
    inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=["<unk>", "<s>", "</s>", *fallback], show_progress=False
    )
    if metaspace:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=True)
    else:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = [word for sentence in SENTENCES for word in sentence.split()]
    inner.train_from_iterator([*SENTENCES, *words] if metaspace else words, trainer)
    document = json.loads(inner.to_str())  # bytes are in the vocabulary of published ones, and no special tokens
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] not in fallback]
    inner = Tokenizer.from_str(json.dumps(document))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="session", params=["metaspace", "prepended"])
def llama(request):
    """A tokenizer that puts a space and <s> before a text, as Llama's do in either of their forms."""
    return _llama(request.param == "metaspace")


@pytest.fixture(scope="session")
def bytewise():
    """One token a byte, an end-of-text token, and nothing before a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<|end|>", *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|end|>", eos_token="<|end|>")


@pytest.fixture
def table():
    """Writes rows as a parquet or an arrow file."""
    import pyarrow
    import pyarrow.parquet

    def write(path, rows):
        found = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(found, path)
        else:
            with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, found.schema) as writer:
                writer.write_table(found)

    return write
