"""Instruction records: what is scored, how windows are packed, what is refused."""

from __future__ import annotations

import pytest

from surgery.adaptation.losses import IGNORED
from surgery.data.instruction import InstructDataset, encode, pieces
from surgery.errors import UsageError

RECORDS = {
    "alpaca": {"instruction": "Add.", "input": "1 2", "output": "three"},
    "alpaca, no input": {"instruction": "Greet.", "input": "", "output": "hello"},
    "prompt": {"prompt": "Q: ", "answer": "forty"},
    "completion": {"prompt": "Q: ", "completion": "two"},
    "messages": {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "Two?"},
            {"role": "assistant", "content": "no"},
        ]
    },
}
ANSWERS = {
    "alpaca": "three<|end|>",
    "alpaca, no input": "hello<|end|>",
    "prompt": "forty<|end|>",
    "completion": "two<|end|>",
    "messages": "yes<|end|>no<|end|>",
}


@pytest.mark.parametrize("form", RECORDS)
def test_answers_are_scored_and_prompts_are_not(tokenizer, form):
    example = encode(RECORDS[form], "line 1", tokenizer)
    assert tokenizer.decode(example.ids[example.answer].tolist()) == ANSWERS[form]
    whole = tokenizer.decode(example.ids.tolist())
    assert whole.endswith(ANSWERS[form].split("<|end|>")[-2] + "<|end|>") and whole.count("<|end|>") == (
        2 if form == "messages" else 1
    )


def test_a_chat_template_is_used_and_cut_at_the_answers(tokenizer):
    import copy

    templated = copy.deepcopy(tokenizer)
    templated.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    found = pieces(RECORDS["messages"], "line 1", templated)
    assert [(p.text, p.answer) for p in found] == [
        ("[system]Be short.[user]One?[assistant]", False),
        ("yes<|end|>", True),
        ("[user]Two?[assistant]", False),
        ("no<|end|>", True),
    ]


def test_windows_score_answer_tokens_only(tokenizer):
    examples = [encode(record, "x", tokenizer) for record in RECORDS.values()]
    data = InstructDataset(examples, 128, 8, seed=1, padding=0)
    text = []
    for index in range(len(data.bins)):
        item = data[index]
        scored = item["targets"] != IGNORED
        assert not (scored & ~item["mask"]).any()
        # each scored target is the next input of the same document, where there is a next one
        following = item["input_ids"].roll(-1)
        assert (item["targets"][scored] == following[scored])[:-1].all()
        text.append(tokenizer.decode(item["targets"][scored].tolist()))
        assert int(item["reset"].sum()) == len(data.bins[data.deck[index]])
    assert sorted("".join(text).split("<|end|>")) == sorted("".join(ANSWERS.values()).split("<|end|>"))


def test_examples_are_never_cut(tokenizer):
    examples = [encode({"prompt": "p" * n, "answer": "a"}, "x", tokenizer) for n in (5, 30, 62, 63, 200)]
    data = InstructDataset(examples, 64, 10, seed=1, padding=0)
    assert data.dropped == 2
    kept = sorted(len(example.ids) for group in data.bins for example in group)
    assert kept == [7, 32, 64]
    with pytest.raises(UsageError, match="none of 5 examples fits a context of 4"):
        InstructDataset(examples, 4, 10, seed=1, padding=0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "?"}, "found the fields question"),
        ({"prompt": "?"}, "no answer"),
        ({"prompt": "?", "answer": 3}, "'answer' is a number"),
        ({"prompt": "?", "answer": ""}, "is empty"),
        ({"messages": []}, "not a list"),
        ({"messages": [{"role": "user", "content": "?"}]}, "no assistant turn"),
        ({"messages": [{"content": "?"}]}, "not {role, content}"),
    ],
)
def test_other_records_are_refused_with_their_place(tokenizer, record, message):
    with pytest.raises(UsageError, match=r"qa\.jsonl, record 7") as refusal:
        encode(record, "qa.jsonl, record 7", tokenizer)
    assert message in str(refusal.value)
