"""Needle recall: prompts are exact, nothing is cut, scores are the model's probabilities, a trained base recalls."""

from __future__ import annotations

import random

import pytest
import torch

from surgery.errors import UsageError
from surgery.evaluation import recall
from surgery.evaluation.loading import load_tokenizer
from surgery.evaluation.recall import KINDS, Haystack, needle_recall
from surgery.evaluation.text import load_text
from surgery.hosts import load_model, resolve


@pytest.fixture(scope="module")
def path():
    return resolve("bundled:tiny-gdn")


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def text():
    return load_text("bundled").text[:30_000]


@pytest.fixture(scope="module")
def model(path):
    return load_model(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("needles", [1, 3])
def test_a_prompt_is_exactly_as_long_as_asked_and_holds_its_needle_once(kind, needles, tokenizer, text, fresh_seed):
    haystack = Haystack(text, tokenizer)
    for depth in (0.0, 0.4, 1.0):
        prompt = haystack.prompt(random.Random(fresh_seed), 400, depth, kind, 10, needles)
        assert {len(prompt.tokens) + len(value) for value in prompt.values} == {400}
        assert len({tuple(value) for value in prompt.values}) == 10
        written = tokenizer.decode(prompt.tokens)
        value = tokenizer.decode(prompt.values[0]).strip()
        assert written.count(f" is: {value}.") == 1
        assert not any(tokenizer.decode(other).strip() in written for other in prompt.values[1:])
        assert written.count("One of the special magic") == needles
        key = written.rpartition(" for ")[2].partition(" is:")[0]
        at = tokenizer.decode(prompt.tokens[prompt.position :]).lstrip()
        assert at.startswith(f"One of the special magic {kind} for {key} is: {value}.")


def test_depth_moves_the_needle_through_the_text(tokenizer, text):
    haystack = Haystack(text, tokenizer)
    places = [haystack.prompt(random.Random(7), 800, depth, "numbers").position for depth in (0.0, 0.3, 0.6, 1.0)]
    assert places == sorted(places) and places[0] < 40 and places[-1] > 650


def test_prompts_depend_on_the_seed_alone(tokenizer, text):
    haystack = Haystack(text, tokenizer)
    first, again, other = (haystack.prompt(random.Random(seed), 300, 0.5, "words") for seed in (1, 1, 2))
    assert first == again and first != other


def test_nothing_is_truncated(tokenizer, text, model):
    with pytest.raises(UsageError, match="ask for lengths of at least"):
        needle_recall(model, tokenizer, text, lengths=(40,), samples=1)
    with pytest.raises(UsageError, match="give a longer text"):
        needle_recall(model, tokenizer, text[:2000], lengths=(2048,), samples=1)
    with pytest.raises(UsageError, match="choose one of"):
        needle_recall(model, tokenizer, text, lengths=(256,), samples=1, kind="colours")


@pytest.mark.parametrize("kind", ["numbers", "words"])
def test_scores_are_log_probabilities_of_the_whole_value(kind, tokenizer, text, model, fresh_seed):
    haystack = Haystack(text, tokenizer)
    rng = random.Random(fresh_seed)
    prompts = [haystack.prompt(rng, 200, 0.5, kind, 4) for _ in range(12)]
    prompts = [prompt for prompt in prompts if len(prompt.values[0]) == len(prompts[0].values[0])]
    with torch.no_grad():
        scores = recall._score(model, prompts, "cpu")
        for prompt, row in zip(prompts[:3], scores, strict=False):
            for value, score in zip(prompt.values, row, strict=True):
                whole = torch.tensor([prompt.tokens + value])
                logs = model(whole, use_cache=False).logits[0].log_softmax(-1)
                positions = torch.arange(len(prompt.tokens) - 1, whole.shape[1] - 1)
                expected = logs[positions, torch.tensor(value)].sum()
                assert score == pytest.approx(expected.item(), abs=1e-2, rel=1e-3)


def test_a_trained_base_recalls_and_an_untrained_one_does_not(tokenizer, text, model):
    seen = []
    trained = needle_recall(
        model, tokenizer, text, (256,), (0.0, 1.0), 8, progress=lambda done, whole: seen.append((done, whole))
    )
    assert trained["lengths"][0]["fraction"] >= 0.8
    assert [cell["depth"] for cell in trained["cells"]] == [0.0, 1.0]
    assert sum(cell["right"] for cell in trained["cells"]) == trained["lengths"][0]["right"]
    assert seen[-1] == (16, 16)
    untrained = type(model)(model.config)
    chance = needle_recall(untrained, tokenizer, text, (256,), (0.0, 1.0), 8)
    assert chance["lengths"][0]["fraction"] < 0.8
    assert needle_recall(untrained, tokenizer, text, (256,), (0.0, 1.0), 8) == chance
