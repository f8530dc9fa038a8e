"""Needle recall: prompts are exact, nothing is cut, scores are the model's probabilities, a trained base recalls."""

from __future__ import annotations

import random
import unicodedata

import numpy as np
import pytest
import torch

from surgery.data.texts import load_text
from surgery.errors import UsageError
from surgery.evaluation import words
from surgery.evaluation.boundaries import boundaries
from surgery.evaluation.haystack import TOLERANCE, Haystack
from surgery.evaluation.loading import load_tokenizer
from surgery.evaluation.recall import DEPTHS, needle_prompt, needle_prompts, needle_recall
from surgery.evaluation.scoring import State, candidate_scores
from surgery.evaluation.words import KINDS
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
        prompt = needle_prompt(haystack, random.Random(fresh_seed), 400, depth, kind, 10, needles)
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
    places = [
        needle_prompt(haystack, random.Random(7), 800, depth, "numbers").position for depth in (0.0, 0.3, 0.6, 1.0)
    ]
    assert places == sorted(places) and places[0] < 40 and places[-1] > 650


SCRIPTS = {
    "chinese": "今天的天气很好，我们去公园散步。他问：“你要来吗？”大家都笑了！",
    "japanese": "きょうは雨です。あしたは晴れるでしょうか？わかりません。",
    "hindi": "आज मौसम अच्छा है। हम बाज़ार जाते हैं। क्या तुम आओगे? ",
    "arabic": "الجو جميل اليوم. هل تأتي معنا؟ نعم، سآتي غدا! ",
    "urdu": "آج موسم اچھا ہے۔ ہم بازار جاتے ہیں۔ ",
    "thai without spaces": "วันนี้อากาศดีมากเราจึงไปเดินเล่นที่สวนสาธารณะ",
    "one line of words": "alpha beta gamma delta epsilon zeta eta theta ",
    "one line without spaces": "abcdefghijklmnopqrstuvwxyz0123456789",
    "wrapped lines without sentences": "some words of a line that goes on\nand on without an end\n",
}
ENDS = {"chinese": "。？！”", "japanese": "。？", "hindi": "।?", "arabic": ".؟!", "urdu": "۔"}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("length", [300, 512])
def test_every_length_is_reached_where_a_character_is_several_tokens(length, seed, tokenizer):
    """In a text of three tokens a character, what stands before a needle at its very end rarely adds up by itself."""
    rng = random.Random(seed)
    text = "".join(rng.choice("的一是不了人我在有他这为之大来以个中上们到说国和地也子时道") for _ in range(3000))
    for prompt in needle_prompts(Haystack(text, tokenizer), [length], DEPTHS, 4, seed):
        assert {len(prompt.tokens) + len(value) for value in prompt.values} == {length}
        assert abs(prompt.reached - prompt.depth) < 2 * TOLERANCE


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("length", [256, 900])
def test_needles_lie_where_they_are_said_to_lie_in_any_script(script, length, tokenizer):
    """The depth is counted again in the finished prompt, from the tokens before the needle."""
    unit = SCRIPTS[script]
    haystack = Haystack(unit * (40 * length // len(tokenizer.encode(unit))), tokenizer)
    head = len(tokenizer.encode(words.introduction("numbers"), add_special_tokens=False)) + len(haystack.begin)
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        prompt = needle_prompt(haystack, random.Random(f"{script} {depth}"), length, depth, "numbers")
        assert len(prompt.tokens) + len(prompt.values[0]) == length
        before = prompt.position - head
        key = tokenizer.decode(prompt.tokens).rpartition(" for ")[2].partition(" is:")[0]
        needle = words.statement("numbers", key, tokenizer.decode(prompt.values[0]).strip())
        tail = len(tokenizer.encode(words.question("numbers", key)))
        around = [len(tokenizer.encode(form)) for form in (f"{needle}\n", f" {needle}", f"\n{needle}\n")]
        text = len(prompt.tokens) - head - tail
        assert before / (text - min(around)) <= prompt.reached <= before / (text - max(around))
        assert abs(prompt.reached - depth) <= TOLERANCE + 0.02
        written = tokenizer.decode(prompt.tokens[: prompt.position])
        assert "\ufffd" not in written  # no character is cut in two before the needle
        if 0 < depth < 1 and script in ENDS and length == 900:  # 256 tokens hold too few of these sentences
            assert written.rstrip()[-1] in ENDS[script]
        if 0 < depth < 1 and script == "one line of words":
            assert written.endswith(tuple(unit.split()))


def test_no_cut_takes_a_combining_mark_from_its_letter(tokenizer):
    haystack = Haystack("เมื่อคืนนี้ฝนตกหนักมากที่กรุงเทพฯ नमस्ते दुनिया " * 20, tokenizer)
    assert len(haystack.places.characters) > 300
    for index in haystack.places.characters[:-12]:
        following = tokenizer.decode(haystack.tokens[index : index + 12]).lstrip()
        assert unicodedata.category(following[0])[0] in "LPZ"


def test_cells_tell_the_depth_that_was_reached(tokenizer, model):
    """A text that is one long word between two sentences: needles stand between its characters."""
    text = "A start. " + "abcdefghij" * 4000
    found = needle_recall(model, tokenizer, text, (256,), (0.0, 0.5, 1.0), 2)
    assert [cell["depth"] for cell in found["cells"]] == [0.0, 0.5, 1.0]
    for cell in found["cells"]:
        assert cell["total"] == 2 and abs(cell["reached"] - cell["depth"]) < 0.05


def test_places_between_tokens():
    """Sentence ends, white space and characters, for tokens that leave white space out or hold parts of a character."""
    text = "v1.2 is out. So? 好。是 e\u0301a"
    spans = [(0, 4), (5, 7), (8, 11), (11, 12), (13, 16), (17, 18), (17, 18), (18, 19), (19, 20), (21, 22), (22, 24)]
    places = boundaries(text, np.array(spans))
    assert places.sentences == [4, 5, 8]  # after "out.", after "So?", after the full-width stop
    assert places.spaces == [1, 2, 4, 5, 8, 9]
    assert places.characters == [1, 2, 3, 4, 5, 7, 8, 9]  # not inside 好, not before the accent


def test_prompts_depend_on_the_seed_alone(tokenizer, text):
    haystack = Haystack(text, tokenizer)
    first, again, other = (needle_prompt(haystack, random.Random(seed), 300, 0.5, "words") for seed in (1, 1, 2))
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
    prompts = [needle_prompt(haystack, rng, 200, 0.5, kind, 4) for _ in range(12)]
    prompts = [prompt for prompt in prompts if len(prompt.values[0]) == len(prompts[0].values[0])]
    with torch.no_grad():
        scores = candidate_scores(State.of(model, [p.tokens for p in prompts]), [p.values for p in prompts])
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
