"""Recall documents can be answered from what stands before, in words and templates that are not the evaluation's."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter

import numpy as np
import pytest

from surgery.evaluation.words import ADJECTIVES, NOUNS
from surgery.pretraining import lists, needles, tracing
from surgery.pretraining.curriculum import MAKERS, encode_document, recall_window, tokens_and_kinds
from surgery.pretraining.drawing import ANSWER, RANDOM, TEXT, words_of

PROGRESS = (0.0, 0.1, 0.3, 0.9)


def drawn(maker, seed, words, haystack, count=60, room=900):
    rng = random.Random(f"{maker.__name__}/{seed}")
    return [maker(rng, words, haystack, PROGRESS[index % 4], room) for index in range(count)]


def known(document):
    """What is not text, in order."""
    return [(piece, kind) for piece, kind in document.pieces if kind != TEXT]


def test_a_list_asks_for_what_was_written_last(words, haystack, fresh_seed):
    rewritten = 0
    for document in drawn(lists.list_document, fresh_seed, words, haystack, 200):
        pieces = known(document)
        held, answers = {}, 0
        for (key, is_key), (value, kind) in zip(pieces[::2], pieces[1::2], strict=True):
            assert is_key == RANDOM
            if kind == ANSWER:
                assert held[key] == value
                answers += 1
            else:
                rewritten += key in held
                held[key] = value
        assert answers > 0
    assert rewritten > 0


def test_lists_grow(words, haystack):
    assert [lists.most_pairs(progress) for progress in (0, 0.2, 0.4, 1)] == [8, 45, 256, 256]
    early, late = (
        [len(known(lists.list_document(random.Random(seed), words, haystack, progress, 4000))) for seed in range(60)]
        for progress in (0.0, 1.0)
    )
    assert max(early) <= 2 * 8 * 4 < max(late)


def test_needles_are_asked_for_as_they_were_told(words, haystack, fresh_seed, monkeypatch):
    monkeypatch.setattr(needles, "WORDINGS", (("<{noun} {key}={value}>", "[{key}?{value}]", "[all {key}: "),))
    kinds = Counter()
    for document in drawn(needles.needle_document, fresh_seed, words, haystack, 200):
        held = {}
        for key, value in re.findall(r"<\w+ ([\w-]+)=([\w-]+)>", document.text):
            held.setdefault(key, []).append(value)
        single = re.findall(r"\[([\w-]+)\?([\w-]+)\]", document.text)
        collected = re.findall(r"\[all ([\w-]+): ([\w, -]+)", document.text)
        at_once = re.findall(r"\nThe \w+s of (.*) in this order: (.*)\n", document.text)
        assert all(held[key] == [value] for key, value in single)
        assert all(held[key] == values.split(", ") for key, values in collected)
        assert all(values.split(", ") == [held[key][0] for key in keys.split(", ")] for keys, values in at_once)
        kinds.update(single=bool(single), collected=bool(collected), at_once=bool(at_once))
        answers = sum(kind == ANSWER for _, kind in document.pieces)
        told = sum(len(values.split(", ")) for _, values in (*collected, *at_once))
        assert answers == len(single) + told > 0
    assert min(kinds.values()) > 5, kinds


@pytest.mark.parametrize("forms", [needles.WORDINGS, tracing.FORMS])
def test_a_question_ends_in_its_value(forms):
    for one in forms:
        question = one[1] if forms is needles.WORDINGS else one[2]
        assert 0 <= question.index("{key}") < question.index("{value}")


def test_needles_leave_the_text_around_them_whole(words, haystack, fresh_seed, monkeypatch):
    monkeypatch.setattr(needles, "WORDINGS", (("<{noun} {key}={value}>", "\n{key}?{value}", "\nall {key}: "),))
    whole = 0
    for document in drawn(needles.needle_document, fresh_seed, words, haystack, 100):
        text = re.sub(r"<[^>]*>", " ", document.text).partition("\n")[0]
        whole += len(text) > 50 and " ".join(text.split()) in haystack
    assert whole > 40


def test_a_name_has_the_value_at_the_start_of_its_chain(words, haystack, fresh_seed, monkeypatch):
    form = ("<{key}={value}>", "<{key}:{other}>", "[{key}?{value}]", "same: ")
    monkeypatch.setattr(tracing, "FORMS", (form,))
    depth = together = 0
    for document in drawn(tracing.tracing_document, fresh_seed, words, haystack, 100):
        held, steps = {}, {}
        for key, copies, value in re.findall(r"<(\w+)([=:])(\w+)>", document.text):
            held[key] = held[value] if copies == ":" else value
            steps[key] = steps.get(value, 0) + 1
        depth = max(depth, *steps.values())
        answers = dict(re.findall(r"\[(\w+)\?(\w+)\]", document.text))
        assert answers == held
        for asked, members in re.findall(r"same: (\w+): (.*)\n", document.text):
            assert members.split(", ") == [key for key, value in held.items() if value == asked]
            together += 1
    assert depth >= 4 and together > 10


def test_the_words_told_are_the_most_frequent_in_order(words, haystack, fresh_seed):
    for document in drawn(tracing.frequent_document, fresh_seed, words, haystack, 80):
        counts = Counter(piece for piece, kind in document.pieces if kind == RANDOM)
        told = [piece for piece, kind in document.pieces if kind == ANSWER]
        ranked = counts.most_common()
        assert told == [word for word, _ in ranked[: len(told)]]
        assert len({count for _, count in ranked[: len(told) + 1]}) == len(told) + 1, "two are as frequent"


def test_no_document_is_worded_as_the_evaluation(words, haystack, fresh_seed):
    measured = {*ADJECTIVES, *NOUNS}
    assert not measured & {*words.many, *words.single}
    assert not measured & {*words_of(["the brave old river of amber foxes"] * 9, len).many}
    for maker in MAKERS:
        for document in drawn(maker, fresh_seed, words, haystack):
            assert "special magic" not in document.text
            for piece, kind in document.pieces:
                assert kind == TEXT or not measured & {*re.findall("[a-z]+", piece)} - {"may"}


@pytest.mark.parametrize("maker", MAKERS)
def test_tokens_have_the_kind_of_their_piece(maker, words, haystack, tokenizer, fresh_seed):
    for document in drawn(maker, fresh_seed, words, haystack, 12):
        ids, kinds = tokens_and_kinds(encode_document(tokenizer, document))
        assert tokenizer.decode(ids.tolist()) == document.text
        for kind in (RANDOM, ANSWER):
            pieces = "".join(piece for piece, of in document.pieces if of == kind)
            found = tokenizer.decode(ids[kinds == kind].tolist())
            assert re.sub(r"\W", "", found) == re.sub(r"\W", "", pieces)


def test_a_window_is_full_and_every_document_in_it_is_marked(words, haystack, tokenizer, fresh_seed):
    for progress in PROGRESS:
        window = recall_window(random.Random(fresh_seed), tokenizer, words, [haystack], progress, 512)
        ids, kinds = tokens_and_kinds(window)
        assert window.shape == (512,) and window.dtype == np.uint16 and ids[0] == 0
        begins = np.flatnonzero(ids == 0)
        # only the last document, which is text, may go without a question
        for begin, end in itertools.pairwise(begins):
            assert (kinds[begin:end] == ANSWER).any()


def test_windows_depend_on_the_seed_alone(words, haystack, tokenizer):
    one, same, other = (
        recall_window(random.Random(seed), tokenizer, words, [haystack], 0.4, 300) for seed in (1, 1, 2)
    )
    assert (one == same).all() and (one != other).any()
