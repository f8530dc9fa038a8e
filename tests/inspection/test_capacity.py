"""Whether memory limits a model, told from how many of a list's values it recalls."""

from __future__ import annotations

import pytest

from surgery.data.texts import Text, load_text
from surgery.errors import UsageError
from surgery.evaluation.loading import load_tokenizer
from surgery.hosts import resolve
from surgery.inspection import capacity as module
from surgery.inspection.capacity import FLOOR, LEAST, LENGTHS, PAIRS, capacity, judge


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve("bundled:tiny-gdn"))


@pytest.fixture
def asked(tokenizer, monkeypatch):
    """The capacity of a model that recalls as a function of pairs and length says; what it was asked, in order."""

    def measure(share, tokens=13_000):
        seen = []

        def fill(model, tokenizer, cells, plan, progress):
            for cell in cells:
                seen.append((cell.pairs, cell.length, len(cell.documents)))
                hits = round(share(cell.pairs, cell.length) * cell.pairs)
                cell.keys = [[index < hits for index in range(cell.pairs)] for _ in cell.documents]
                cell.scores["forced"] = [hits / cell.pairs] * len(cell.documents)

        monkeypatch.setattr(module, "score_cells", fill)
        text = Text("a text", load_text("bundled", "train").text[:60_000])
        return capacity(None, tokenizer, text, tokens), seen

    return measure


def test_one_that_recalls_what_fits_is_limited_by_memory(asked):
    result, seen = asked(
        lambda pairs, length: 1.0 if pairs < 32 and (length or 0) < 2048 else 0.75 if pairs < 64 else 0.5
    )
    verdict = judge(result["cells"])
    assert verdict.kind == "limited by memory"
    assert verdict.below["0.9"]["alone"]["pairs"] == 32 and verdict.below["0.9"]["alone"]["length"] is None
    assert (verdict.below["0.9"]["within"]["pairs"], verdict.below["0.9"]["within"]["length"]) == (4, 2048)
    assert verdict.below["0.6"].keys() == {"alone"} and verdict.below["0.6"]["alone"]["pairs"] == 64
    assert "below 0.9 from 32 pairs (0.75 right" in verdict.words
    assert "from 4 pairs within 2,048 tokens (0.75 right" in verdict.words
    assert all(documents >= LEAST for _, _, documents in seen)


def test_one_that_cannot_recall_is_asked_nothing_harder(asked):
    result, seen = asked(lambda pairs, length: 0.25)
    assert [(pairs, length) for pairs, length, _ in seen] == [(4, None)] and FLOOR > 0.25
    assert len(result["left_out"]) == len(PAIRS) * (1 + len(LENGTHS)) - 1
    verdict = judge(result["cells"])
    assert verdict.kind == "cannot recall" and "cannot recall even 4 pairs (0.25 right" in verdict.words
    assert "operating on memory cannot help" in verdict.words


def test_a_length_at_which_nothing_is_recalled_ends_its_row_alone(asked):
    _, seen = asked(lambda pairs, length: 0.0 if length else 1.0)
    assert [length for pairs, length, _ in seen if pairs == 4] == [None, 512]
    assert {pairs for pairs, _, _ in seen} > {4, 8, 16}


def test_one_that_recalls_everything_is_not_limited(asked):
    result, _ = asked(lambda pairs, length: 1.0)
    verdict = judge(result["cells"])
    assert verdict.kind == "not limited" and not verdict.below
    assert f"up to {max(cell['pairs'] for cell in result['cells'])} pairs" in verdict.words
    reasons = " ".join(cell["reason"] for cell in result["left_out"])
    assert "documents of" in reasons and "are more than 13000" in reasons  # what the limit on tokens leaves out is told


def test_one_that_recalls_in_part(asked):
    result, _ = asked(lambda pairs, length: 0.75)
    verdict = judge(result["cells"])
    assert verdict.kind == "recalls in part" and "nowhere below 0.6" in verdict.words


def test_tokens_for_too_few_documents_are_refused(asked):
    with pytest.raises(UsageError, match=r"--tokens: 6 documents of \d+ tokens are more than 300; give more"):
        asked(lambda pairs, length: 1.0, tokens=300)
