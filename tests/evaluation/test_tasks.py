"""Every task's documents: exactly as long as asked, with what is asked for in them, whatever the tokenizer."""

from __future__ import annotations

import random
import re

import pytest

from surgery.data.texts import load_text
from surgery.errors import UsageError
from surgery.evaluation.haystack import TooLong
from surgery.evaluation.tasks import TASKS, chosen_tasks
from surgery.evaluation.tasks.base import Texts, share_found

LENGTHS = (1500, 2600)


def byte_level(begin: bool = False):
    """Bytes with merges that join a space to what follows, as GPT-NeoX's tokenizer has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<s>"],
    )
    tokenizer.train_from_iterator([load_text("bundled").text[:60_000]], trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def prefix_space():
    """Words after a mark for the space, one of which is put before every text, as Llama's first tokenizer has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="always"), pre_tokenizers.Digits(individual_digits=True)]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    text = load_text("bundled").text[:60_000]
    letters = "".join(chr(code) for code in range(32, 127)) + "\n"
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=sorted({*letters, *text}), special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator([text, letters], trainer)
    return tokenizer


@pytest.fixture(scope="module", params=["byte level", "with a begin token", "prefix space"])
def texts(request):
    from transformers import PreTrainedTokenizerFast

    made = prefix_space() if request.param == "prefix space" else byte_level(begin="begin" in request.param)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    return Texts(load_text("bundled").text[:60_000], tokenizer, 5200)


def made(texts, name, seed, length, pairs=8, **options):
    task = TASKS[name]
    return task.document(texts, random.Random(seed), length, pairs=pairs if task.listing else None, **options)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_document_is_exactly_as_long_as_asked(name, length, texts, fresh_seed):
    if name in ("common_words", "multikey_3"):
        length *= 2  # bytes of UUIDs and of a hundred words take more
    document = made(texts, name, fresh_seed, length)
    assert document == made(texts, name, fresh_seed, length) != made(texts, name, fresh_seed + 1, length)
    assert document.tokens == length
    begin = texts.text.begin
    assert document.prompt[: len(begin)] == begin and document.prompt.count(0) == len(begin)
    for answer, value in zip(document.answers, document.candidates, strict=False):
        assert texts.tokenizer.decode(value).strip() == answer
    assert len({tuple(value) for value in document.candidates}) == len(document.candidates) > document.right
    assert len({len(value) for value in document.candidates}) == 1
    # the answer goes on from the prompt as in a text that holds both
    written = texts.tokenizer.decode(document.prompt[len(begin) :])
    whole = [*begin, *texts.text.encode(f"{written.lstrip(' ')} {document.answers[0]}")]
    assert whole[-len(document.candidates[0]) :] == document.candidates[0]
    if len(document.answers) == 1:
        assert document.room == len(document.candidates[0]) + 1
        assert 0 <= document.depth <= 1


def prompt_of(texts, document):
    return texts.tokenizer.decode(document.prompt, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3"])
def test_one_needle_is_asked_for_at_its_depth(name, texts, fresh_seed):
    length = 5200
    for depth in (0.0, 0.5, 1.0):
        document = made(texts, name, fresh_seed, length, depth=depth)
        written = prompt_of(texts, document)
        key = written.rpartition(" for ")[2].removesuffix(" is:")
        needles = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", written)
        assert [value for name, value in needles if name == key] == [document.answers[0]]
        place = written.index(f"for {key} is: ") / len(written)
        assert abs(place - depth) < 0.2 and abs(document.depth - depth) < 0.12
        count = {"multikey_1": 4, "multikey_2": 10, "multikey_3": 10}.get(name, 1)
        assert len(needles) == count if count < 10 else len(needles) >= count
        if count >= 10:  # every candidate is another needle's value
            hard = {texts.tokenizer.decode(value).strip() for value in document.candidates}
            assert hard <= {value for _, value in needles}


def test_several_values_are_asked_for(texts, fresh_seed):
    for name, keys in (("multivalue", 1), ("multiquery", 4)):
        document = made(texts, name, fresh_seed, 1500)
        needles = re.findall(r"One of the special magic numbers for (\S+) is: (\d+)\.", prompt_of(texts, document))
        assert sorted(value for _, value in needles) == sorted(document.answers)
        assert len({key for key, _ in needles}) == keys and len(needles) == 4
        if name == "multiquery":  # in the order of the text, as the question says
            assert tuple(value for _, value in needles) == document.answers


def test_the_variables_of_a_chain(texts, fresh_seed):
    written = prompt_of(texts, document := made(texts, "variable_tracing", fresh_seed, 1500))
    number = written.rpartition("the value ")[2].removesuffix(" are:")
    held = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", written):  # in the order of the text
        held[name] = held.get(source, source)
    assert sorted(name for name, value in held.items() if value == number) == sorted(document.answers)
    assert len(held) == 10


def test_the_words_that_come_most_often(texts, fresh_seed):
    written = prompt_of(texts, document := made(texts, "common_words", fresh_seed, 4000))
    words = re.findall(r"\d+\. ([a-z]+-[a-z]+)", written)
    counts = {word: words.count(word) for word in words}
    common = {word for word, count in counts.items() if count >= 10}
    assert common == set(document.answers) and len(common) == 10
    assert max(count for word, count in counts.items() if word not in common) * 10 == counts[document.answers[0]]

    written = prompt_of(texts, document := made(texts, "frequent_words", fresh_seed, 1500))
    words = re.findall(r"\b[a-z]{6}\b", written)
    ranked = sorted(set(words), key=words.count, reverse=True)
    assert set(ranked[:3]) == set(document.answers) and words.count(ranked[2]) > words.count(ranked[3])


@pytest.mark.parametrize("name", ["list_recall", "list_update"])
@pytest.mark.parametrize("length", [None, 2600])
@pytest.mark.parametrize("pairs", [4, 30])
def test_every_key_of_a_list_is_asked_again(name, length, pairs, texts, fresh_seed):
    document = made(texts, name, fresh_seed, length, pairs)
    decode = texts.tokenizer.decode
    assert document.tokens == (length or len(document.whole)) and len(document.asked) == pairs
    assert document.prompt == list(document.whole[: document.asked[0].start])
    text = decode(document.whole, skip_special_tokens=True)
    lines = [line for line in text.splitlines() if re.search(r"[a-z]+-[a-z]+.* \d\d\d( \||\.)?$", line)]
    entries = [(re.search(r"[a-z]+-[a-z]+", line)[0], re.search(r"\d\d\d", line)[0]) for line in lines]
    told, again = entries[:-pairs], entries[-pairs:]
    updated = round(pairs / 3) if name == "list_update" else 0
    assert len(told) == pairs + updated and len(dict(told)) == pairs
    assert dict(told) == dict(again)  # the last value counts
    assert [key for key, _ in again] != [key for key, _ in told[:pairs]]
    assert [decode(document.whole[one.start : one.stop]).strip() for one in document.asked] == [v for _, v in again]
    assert [one.updated for one in document.asked] == [key in dict(told[pairs:]) for key, _ in again]
    places = [max(i for i, (key, _) in enumerate(told) if key == asked) for asked, _ in again]
    assert [one.depth for one in document.asked] == pytest.approx([place / (len(told) - 1) for place in places])
    candidates = [decode(value).strip() for value in document.candidates]
    assert candidates[0] == document.answers[0] == again[0][1] and set(candidates) <= {value for _, value in told}
    if document.asked[0].updated:  # the value that the key had before is the hardest
        assert candidates[1] == dict(told[:pairs])[again[0][0]]


def test_what_does_not_fit_is_told(texts):
    for name in TASKS:
        with pytest.raises(TooLong, match=rf"{name} at 60 tokens"):
            made(texts, name, 1, 60, pairs=100)
    with pytest.raises(UsageError, match="the text holds only"):
        TASKS["single_2"].document(texts, random.Random(1), 10**6)
    with pytest.raises(UsageError, match="task 'needle': choose among single_1, "):
        chosen_tasks(["single_1", "needle"])
    with pytest.raises(UsageError, match="each task once"):
        chosen_tasks(["single_1", "single_1"])
    assert [task.name for task in chosen_tasks(["all"])] == list(TASKS)


def test_a_tokenizer_that_joins_key_and_value_is_refused(texts, monkeypatch):
    from surgery.evaluation.tasks import listing

    joined = (("{key}:", "\n"),)
    monkeypatch.setattr(listing, "LAYOUTS", joined)
    made(texts, "list_recall", 1, None)
    original = listing.spans_of

    def glued(tokenizer, text):
        """The last value's first token also holds what stands before it."""
        found = original(tokenizer, text)
        start = text.rindex(":") + 1
        index = next(i for i, (a, b) in enumerate(found.spans) if b > start)
        found.spans[index, 0] = start - 2
        return found

    monkeypatch.setattr(listing, "spans_of", glued)
    with pytest.raises(UsageError, match="the tokenizer joins a key and its value"):
        made(texts, "list_recall", 1, None)


def test_share_found():
    assert share_found(" 123, and 456.", ("123", "456")) == 1
    assert share_found("1234, x456", ("123", "456")) == 0
    assert share_found("Red-Fox red-foxes", ("red-fox", "fox")) == 0.5
