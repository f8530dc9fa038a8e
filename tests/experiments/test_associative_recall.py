"""Associative recall: every answer is the newest value of its key, and queries lie where the power law puts them."""

from __future__ import annotations

import pytest
import torch

from surgery.errors import UsageError
from surgery.experiments.associative_recall import BLOCK, EXPONENT, AssociativeRecall

TASKS = ("base", "update", "block")


def pairs_of(task: AssociativeRecall, context: list[int]) -> list[tuple[int, int]]:
    """Keys and values in the order in which they are written."""
    if task.task != "block":
        return list(zip(context[::2], context[1::2], strict=True))
    found, start = [], 0
    while start < len(context):
        size = min(BLOCK, (len(context) - start) // 2)
        part = context[start : start + 2 * size]
        found += zip(part[:size], part[size:], strict=True)
        start += 2 * size
    return found


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(("pairs", "vocabulary", "length"), ((3, 16, None), (20, 64, None), (10, 128, 100)))
def test_each_answer_is_the_newest_value_of_its_key(name, pairs, vocabulary, length):
    task = AssociativeRecall(name, pairs, vocabulary, length)
    ids, targets = task.draw(50, torch.Generator().manual_seed(3))
    assert ids.shape == targets.shape == (50, length or task.context + 2 * pairs)
    assert ids.shape[1] >= 4 * pairs
    for sequence, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        written = pairs_of(task, sequence[: task.context])
        assert all(0 < key < vocabulary // 2 <= value < vocabulary for key, value in written)
        first, again = written[:pairs], written[pairs:]
        assert len(dict(first)) == pairs
        assert len(dict(again)) == task.rewritten and dict(again).keys() <= dict(first).keys()
        assert len({value for _, value in written}) == len(written)
        newest = dict(written)
        answers = {place: value for place, value in enumerate(wanted) if value >= 0}
        assert sorted(sequence[place] for place in answers) == sorted(newest)
        for place, value in answers.items():
            assert place >= task.context and value == newest[sequence[place]]
        asked = [token for token in sequence[task.context :] if token]
        assert len(asked) == pairs  # and everything else there is 0, the places after the queries too


def test_update_writes_the_asked_share_again():
    assert AssociativeRecall("update", 48).rewritten == 24
    assert AssociativeRecall("update", 48, updated=0.25).rewritten == 12
    assert AssociativeRecall("base", 48).rewritten == 0


def test_the_first_gap_follows_the_power_law():
    task = AssociativeRecall("base", 1, 16, length=34)
    _, targets = task.draw(40_000, torch.Generator().manual_seed(5))
    places = ((targets >= 0).int().argmax(1) - task.context) // 2
    found = torch.bincount(places, minlength=16) / 40_000
    law = torch.arange(1, 17, dtype=torch.float64) ** (EXPONENT - 1)
    law /= law.sum()
    error = (law * (1 - law) / 40_000).sqrt()
    assert ((found - law).abs() < 5 * error).all()


def test_a_seed_fixes_the_sequences():
    task = AssociativeRecall("update", 8, 64)
    one, again, other = (task.draw(4, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2))
    assert one.equal(again) and not one.equal(other)


@pytest.mark.parametrize(
    ("settings", "says"),
    (
        ({"task": "swap", "pairs": 4}, "--task swap"),
        ({"task": "base", "pairs": 0}, "--pairs 0"),
        ({"task": "base", "pairs": 8, "vocabulary": 16}, "--vocabulary 16: 8 pairs of base need 18"),
        ({"task": "update", "pairs": 6, "vocabulary": 16}, "--vocabulary 16: 6 pairs of update need 18"),
        ({"task": "base", "pairs": 8, "length": 31}, "--length 31: 8 pairs and their queries need 32"),
        ({"task": "update", "pairs": 8, "updated": 0.0}, "--updated 0.0"),
        ({"task": "update", "pairs": 8, "updated": 1.5}, "--updated 1.5"),
    ),
)
def test_sizes_that_do_not_fit_are_refused(settings, says):
    with pytest.raises(UsageError, match=says):
        AssociativeRecall(**settings)
