"""Tasks on models that are known to answer right, wrong, or with what a key had before."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from surgery.data.texts import Text, load_text
from surgery.errors import JobError, UsageError
from surgery.evaluation.intervals import wilson
from surgery.evaluation.tasks import TASKS, chosen_tasks
from surgery.evaluation.tasks.base import Texts
from surgery.evaluation.tasks.measuring import TaskPlan, build_cells, compare_tasks, measure_tasks
from surgery.evaluation.tasks.needles import Single2


class Layer:
    """A cache layer that holds what was read."""

    def __init__(self, ids):
        self.held = {0: ids}

    def reorder_cache(self, rows):
        self.held[0] = self.held[0][rows]


class Cache:
    def __init__(self, ids):
        self.layers = [Layer(ids)]

    def reorder_cache(self, rows):
        for layer in self.layers:
            layer.reorder_cache(rows)


class Oracle(nn.Module):
    """Continues texts that it knows by heart, token by token, and says token 0 after all others."""

    def __init__(self, vocab_size, texts):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab_size)
        self.weight = nn.Parameter(torch.zeros(1))
        self.next = {tuple(text[:at]): text[at] for text in texts for at in range(1, len(text))}

    def forward(self, input_ids, cache=None, use_cache=False):
        whole = input_ids if cache is None else torch.cat([cache.layers[0].held[0], input_ids], dim=1)
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        before = whole.shape[1] - input_ids.shape[1]
        for row, ids in enumerate(whole.tolist()):
            for at in range(input_ids.shape[1]):
                logits[row, at, self.next.get(tuple(ids[: before + at + 1]), 0)] = 9.0
        return SimpleNamespace(logits=logits, cache=Cache(whole))


@pytest.fixture(scope="module")
def text():
    return Text("a text", load_text("bundled").text[:30_000])


def plan(names, lengths, samples=5, pairs=(4, 8), **options):
    return TaskPlan(chosen_tasks(names.split(",")), lengths, pairs, samples, **options)


def known(text, tokenizer, asked, answer):
    """What an oracle reads to answer every document of a plan with ``answer(document)``, strings."""
    texts = Texts(text.text, tokenizer, max(length or 0 for length in asked.lengths))
    for cell in build_cells(texts, asked)[0]:
        for document in cell.documents:
            written = " " + ", ".join(answer(document)) + "."
            yield [*document.prompt, *texts.text.encode(written)]
            if document.whole:
                yield list(document.whole)


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("common_words", "multikey_3")])
def test_who_knows_every_answer_has_all_right(name, text, tokenizer):
    asked = plan(name, [1000], 2, pairs=(4,))
    oracle = Oracle(300, known(text, tokenizer, asked, lambda document: document.answers))
    (cell,) = measure_tasks(oracle, tokenizer, asked, text)["cells"]
    assert {score: found["mean"] for score, found in cell["scores"].items()} == dict.fromkeys(cell["scores"], 1.0)
    assert set(cell["scores"]) == {"written", "chosen"} | ({"forced"} if TASKS[name].listing else set())
    assert cell["tokens"] == 1000 and cell["documents"] == 2
    assert bool(cell["depths"]) == (TASKS[name].depths or TASKS[name].listing)
    nobody = Oracle(300, [])
    (cell,) = measure_tasks(nobody, tokenizer, asked, text)["cells"]
    assert cell["scores"]["written"]["mean"] == 0 and cell["scores"].get("forced", {"mean": 0})["mean"] == 0


class Passwords(Single2):
    """Two words to find, a task from outside the package."""

    name, about, kind = "passwords", "two words in text", "words"


def test_a_task_from_outside_is_one_class_and_one_line(text, tokenizer, monkeypatch):
    monkeypatch.setitem(TASKS, Passwords.name, Passwords())
    asked = plan("passwords", [1000], 2)
    oracle = Oracle(300, known(text, tokenizer, asked, lambda document: document.answers))
    (cell,) = measure_tasks(oracle, tokenizer, asked, text)["cells"]
    assert cell["task"] == "passwords" and cell["scores"]["written"]["mean"] == 1.0


def test_part_of_an_answer_counts_in_part(text, tokenizer):
    asked = plan("multiquery,variable_tracing", [1400], 3)
    oracle = Oracle(300, known(text, tokenizer, asked, lambda document: document.answers[:2]))
    four, five = measure_tasks(oracle, tokenizer, asked, text)["cells"]
    assert four["scores"]["written"]["mean"] == 0.5
    assert five["scores"]["written"]["mean"] == pytest.approx(0.4)
    assert four["scores"]["chosen"]["mean"] == 1 and four["scores"]["chosen"]["chance"] == 0.1
    assert five["scores"]["chosen"]["chance"] == 0.5 and not four["depths"]


def test_what_is_written_after_the_end_is_no_answer(text, make_tokenizer):
    tokenizer = make_tokenizer(300)
    asked = plan("multiquery", [1400], 2)
    sequences = list(known(text, tokenizer, asked, lambda document: document.answers))
    full = measure_tasks(Oracle(300, sequences), tokenizer, asked, text)["cells"][0]["scores"]["written"]
    # ", " of the answer's list is the token that ends a text
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokenizer.encode(",")[0])
    cut = measure_tasks(Oracle(300, sequences), tokenizer, asked, text)["cells"][0]["scores"]["written"]
    assert full["mean"] == 1 and cut["mean"] == 0.25


def test_who_keeps_the_first_value_fails_where_it_was_given_again(text, tokenizer):
    """An oracle that was taught each document with the updated keys' first values."""
    asked = plan("list_update", [None], 12, pairs=(6,))
    texts = Texts(text.text, tokenizer, 0)
    sequences = []
    for document in build_cells(texts, asked)[0][0].documents:
        tokens = list(document.whole)
        lines = tokenizer.decode(document.whole)
        for one in document.asked:
            value = tokenizer.decode(tokens[one.start : one.stop])
            before = tokenizer.decode(tokens[: one.start]).splitlines()[-1]
            first = next(line for line in lines.splitlines() if line.startswith(before))
            old = texts.text.encode(" " + first.removeprefix(before).strip(" .|"))
            assert (old != tokens[one.start : one.stop]) == one.updated and value.strip()
            sequences += [tokens[: one.start] + old[: at + 1] for at in range(len(old))]
            for at in range(len(old)):  # teacher-forced, it reads the right tokens and still expects the old ones
                sequences.append([*tokens[: one.start + at], old[at]])
    # what comes later overrides, and every sequence begins with the right answers to the questions before its own
    (cell,) = measure_tasks(Oracle(300, reversed(sequences)), tokenizer, asked, text)["cells"]
    assert cell["updated"]["given again"]["mean"] == 0 and cell["updated"]["given once"]["mean"] == 1
    assert cell["scores"]["forced"]["mean"] == pytest.approx(4 / 6) and cell["scores"]["forced"]["samples"] == 6
    firsts = [document.asked[0].updated for document in build_cells(texts, asked)[0][0].documents]
    assert cell["scores"]["chosen"]["values"] == [float(not updated) for updated in firsts]
    assert cell["scores"]["written"]["values"] == cell["scores"]["chosen"]["values"]
    depths = {row["depth"]: row["mean"] for row in cell["depths"]}
    assert depths[1.0] == 0  # the lines that give a value again stand last


def test_what_does_not_fit_is_left_out_and_told(text, tokenizer, make_model):
    asked = plan("list_recall,single_2", [300, 700, None], 2, pairs=(4, 20))
    found = measure_tasks(make_model(), tokenizer, asked, text)
    json.dumps(found, allow_nan=False)
    assert [(cell["task"], cell["length"], cell["pairs"]) for cell in found["cells"]] == [
        ("list_recall", 300, 4),
        ("list_recall", 700, 4),
        ("list_recall", None, 4),
        ("list_recall", None, 20),
        ("single_2", 300, None),
        ("single_2", 700, None),
    ]
    left = [(cell["task"], cell["length"], cell["pairs"]) for cell in found["left_out"]]
    assert left == [("list_recall", 300, 20), ("list_recall", 700, 20)]
    assert "20 pairs and their questions take" in found["left_out"][0]["reason"]
    alone = measure_tasks(make_model(), tokenizer, plan("list_recall,single_2", [None], 2, pairs=(4,)), text)
    assert [cell["task"] for cell in alone["cells"]] == ["list_recall"]
    assert alone["left_out"][0]["reason"] == "single_2 has no length of its own: it needs one in tokens"
    with pytest.raises(UsageError, match=r"list_recall at 90 tokens.*\n.*greater lengths or fewer pairs"):
        measure_tasks(make_model(), tokenizer, plan("list_recall", [90]), text)
    with pytest.raises(UsageError, match="single_1 has no length of its own"):
        measure_tasks(make_model(), tokenizer, plan("single_1", [None]), text)


def test_intervals_are_by_document(text, tokenizer, make_model):
    """Three documents wholly known, two unknown: a list's keys count no more than the documents say."""
    asked = plan("list_recall", [None], 5, pairs=(8,))
    sequences = list(known(text, tokenizer, asked, lambda document: document.answers))
    (cell,) = measure_tasks(Oracle(300, sequences[:6]), tokenizer, asked, text)["cells"]
    found = cell["scores"]["forced"]
    assert found["values"] == [1, 1, 1, 0, 0] and found["mean"] == pytest.approx(0.6)
    low, high = wilson(3, 5)
    assert found["low"] < low and found["high"] > high
    written = cell["scores"]["written"]
    assert (written["low"], written["high"]) == (low, high)


def test_difference_to_another_model_is_paired_by_document(text, tokenizer):
    asked = plan("list_recall", [None], 4, pairs=(4, 8))
    sequences = list(known(text, tokenizer, asked, lambda document: document.answers))
    one, two = (measure_tasks(Oracle(300, some), tokenizer, asked, text) for some in (sequences, sequences[::2]))
    difference = compare_tasks(one, two)
    assert [row["pairs"] for row in difference] == [4, 8]
    # every other sequence: of each document the written answer, not the whole
    assert difference[0]["scores"]["forced"]["mean"] > 0.5 and difference[0]["scores"]["written"]["mean"] == 0
    other = measure_tasks(Oracle(300, []), tokenizer, plan("list_recall", [None], 4, pairs=(4, 8), seed=1), text)
    assert compare_tasks(one, other) == []


def test_numbers_that_are_none_are_refused(text, tokenizer, make_model):
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(JobError, match="list_recall of 4 pairs: probabilities that are not numbers"):
        measure_tasks(model, tokenizer, plan("list_recall", [None], 2, pairs=(4,)), text)
    with pytest.raises(JobError, match="single_2 at 400 tokens: probabilities that are not numbers"):
        measure_tasks(model, tokenizer, plan("single_2", [400], 2), text)
