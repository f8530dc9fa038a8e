"""Tokens are those of the tokenizer's own reading of a whole text, wherever pieces of it meet."""

from __future__ import annotations

import random

import pytest

from surgery.data import instruction
from surgery.data.packing import tokenise
from surgery.data.sources import Piece
from surgery.data.texts import load_text
from surgery.data.tokens import begin_text, begin_tokens, encode
from surgery.evaluation.haystack import Haystack
from surgery.evaluation.recall import needle_prompt

WORDS = ("the", "theory", "of", "a thing", "is that", "nothing", "rests", "there", "special magic", "numbers", "yes")


def prose(count, seed=3):
    """Sentences, lines, blanks, other scripts: ``count`` words."""
    draw = random.Random(seed)
    text = ""
    for _ in range(count):
        text += draw.choice(WORDS) + draw.choice([" ", " ", " ", "  ", ". ", ".\n", "\n\n", ", ", " 漢字 ", " é😀 "])
    return text


def whole(tokenizer, text):
    return tokenizer(text, verbose=False)["input_ids"]


def test_a_text_to_measure_is_read_as_the_tokenizer_reads_it(llama, bytewise):
    text = prose(300)
    for tokenizer in (llama, bytewise):
        assert encode(tokenizer, text).ids.tolist() == whole(tokenizer, text)
    assert begin_tokens(llama) == [llama.bos_token_id] and begin_text(llama) == "<s>"
    # that a tokenizer has such a token does not mean that it puts it there
    assert bytewise.bos_token_id == 0 and begin_tokens(bytewise) == [] and begin_text(bytewise) == ""


def test_the_token_before_a_text_stands_for_no_byte(llama):
    tokens = encode(llama, "the thing")
    assert tokens.begin == "<s>"
    assert tokens.num_bytes(0, 1) == 0 and tokens.num_bytes(1) == len("the thing")


@pytest.mark.parametrize("limit", [1, 2, 7, 40, 111])
def test_a_limit_keeps_a_beginning_of_whole_characters(llama, limit):
    text = prose(100)
    part, full = encode(llama, text, limit), encode(llama, text)
    assert limit - 6 < len(part) <= limit
    assert part.ids.equal(full.ids[: len(part)]) and part.ends.equal(full.ends[: len(part)])
    assert text.encode()[: part.num_bytes()].decode() == text[: len(text.encode()[: part.num_bytes()].decode())]


def test_long_texts_leave_no_trace_of_their_windows(llama, bytewise, monkeypatch):
    monkeypatch.setattr("surgery.data.tokens.WINDOW", 700)
    monkeypatch.setattr("surgery.data.tokens.OVERLAP", 64)
    monkeypatch.setattr("surgery.data.packing.WINDOW", 700)
    draw = random.Random(9)
    texts = [prose(900, seed=1), "a" * 3000 + prose(200), "\n" * 2500 + "the end", prose(400) + " " * 900 + prose(9)]
    for tokenizer in (llama, bytewise):
        for text in texts:
            assert encode(tokenizer, text).ids.tolist() == whole(tokenizer, text)
            cuts = sorted(draw.sample(range(1, len(text)), 7))
            parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            pieces = [Piece(part, number == len(parts) - 1) for number, part in enumerate(parts)]
            (made,) = tokenise(pieces, tokenizer)
            assert made == [*whole(tokenizer, text), tokenizer.eos_token_id]


def test_training_documents_begin_and_end_once(llama):
    text = "the theory"
    ids = whole(llama, text)
    assert list(tokenise([text, f"<s>{text}</s>"], llama)) == [
        [*ids, llama.eos_token_id],
        [*whole(llama, f"<s>{text}</s>")[1:]],
    ]
    many = [prose(5, seed) for seed in range(70)] + [prose(3000), "the end"]
    assert list(tokenise(many, llama)) == [[*whole(llama, document), llama.eos_token_id] for document in many]


def test_a_limit_cuts_a_long_document(llama, monkeypatch):
    monkeypatch.setattr("surgery.data.tokens.WINDOW", 700)
    monkeypatch.setattr("surgery.data.packing.WINDOW", 700)
    text = prose(2000)
    (made,) = tokenise([text, "never"], llama, limit=500)
    assert made == whole(llama, text)[:500]


def test_documents_of_an_evaluation_are_apart(tmp_path, llama):
    path = tmp_path / "set.jsonl"
    path.write_text('{"text": "the theory"}\n{"text": "of a thing\\n"}\n{"text": "is"}\n')
    text = load_text(path)
    assert text.text == "the theory\n\nof a thing\nis"
    assert encode(llama, text).ids.tolist() == whole(llama, text.text)


@pytest.mark.parametrize("kind", ["numbers", "words"])
def test_a_needle_prompt_is_one_text(llama, bytewise, kind):
    for tokenizer in (llama, bytewise):
        haystack = Haystack(prose(4000), tokenizer)
        for seed, depth in enumerate((0.0, 0.3, 0.7, 1.0)):
            prompt = needle_prompt(haystack, random.Random(seed), 800, depth, kind, 3)
            text = tokenizer.decode(prompt.tokens, skip_special_tokens=True)
            assert prompt.tokens == whole(tokenizer, text)
            for value in prompt.values:
                assert len(prompt.tokens) + len(value) == 800
                answer = tokenizer.decode([*prompt.tokens, *value], skip_special_tokens=True)
                assert answer.startswith(text + " ") and prompt.tokens + value == whole(tokenizer, answer)
            needle = tokenizer.decode(prompt.tokens[prompt.position :]).lstrip()
            assert needle.startswith(f"One of the special magic {kind} for ")


def test_a_prompt_and_its_answer_are_one_text(llama):
    for prompt, answer in [("What is it?", " The thing."), ("Q: ", "yes"), ("Answer:\n", "forty words"), ("a", "b")]:
        example = instruction.encode({"prompt": prompt, "completion": answer}, "x", llama)
        ids = [*whole(llama, prompt + answer), llama.eos_token_id]
        assert example.ids.tolist() == ids
        scored = llama.decode(example.ids[example.answer].tolist(), skip_special_tokens=True)
        assert scored.strip().endswith(answer.strip()) and len(scored.strip()) <= len(answer.strip()) + 1
        assert not example.answer[0] and example.answer[-1]
