"""Instruction records of every form, through a chat template and without one."""

from __future__ import annotations

import copy
import json

import pytest

from surgery.data.chat import pieces
from surgery.data.instruction import encode
from surgery.errors import UsageError

CHATML = (
    "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
    "{% endfor %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# as Qwen3's: thoughts of earlier turns are dropped, those of the last are kept
THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# as Llama 2's: the system turn goes into the user's, roles alternate, each answer ends with the end token
STRICT = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first %}{{ system }}{% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }} <|end|>{% endif %}{% endfor %}"
)
BARE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def chat(bytewise):
    def make(template):
        tokenizer = copy.deepcopy(bytewise)
        tokenizer.chat_template = template
        return tokenizer

    return make


def turns(*pairs):
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def answers(record, tokenizer, column=None):
    return [piece.text for piece in pieces(record, "x", tokenizer, column) if piece.answer]


def whole(record, tokenizer):
    return "".join(piece.text for piece in pieces(record, "x", tokenizer))


TALK = turns(("system", "Be kind."), ("user", "One?"), ("assistant", "yes"), ("user", "Two?"), ("assistant", "no"))


@pytest.mark.parametrize("template", [CHATML, THINKING, STRICT])
def test_the_text_is_the_template_s_and_ends_once(chat, template):
    tokenizer = chat(template)
    text = tokenizer.apply_chat_template(TALK["messages"], tokenize=False)
    assert whole(TALK, tokenizer) == text
    example = encode(TALK, "x", tokenizer)
    assert tokenizer.decode(example.ids.tolist()) == text  # nothing is added behind it
    scored = tokenizer.decode(example.ids[example.answer].tolist())
    assert scored.count("<|end|>") == 2 and "yes" in scored and "no<" in scored.replace(" ", "")
    assert not any(word in scored for word in ("One", "Two", "kind", "user", "system", "INST", "start"))


def test_an_answer_begins_where_the_model_is_asked(chat):
    assert answers(TALK, chat(CHATML)) == ["yes<|end|>", "no<|end|>"]
    assert answers(TALK, chat(THINKING)) == ["yes<|end|>", "<think>\n\n</think>\nno<|end|>"]
    thought = turns(("user", "One?"), ("assistant", "yes"))
    thought["messages"][1]["reasoning_content"] = "hm"
    assert answers(thought, chat(THINKING)) == ["<think>\nhm\n</think>\nyes<|end|>"]


def test_a_template_without_an_end_gets_one(chat):
    tokenizer = chat(BARE)
    example = encode(TALK, "x", tokenizer)
    assert tokenizer.decode(example.ids.tolist()).endswith("[assistant]no<|end|>")
    assert tokenizer.decode(example.ids[example.answer].tolist()) == "yesno<|end|>"


def test_roles_stand_in_any_order_that_the_template_takes(chat):
    first = turns(("assistant", "Hello!"), ("user", "hi"), ("user", "there?"), ("assistant", "yes"), ("critic", "good"))
    assert answers(first, chat(CHATML)) == ["Hello!<|end|>", "yes<|end|>"]
    assert answers(first, chat(BARE)) == ["Hello!", "yes"]


def test_what_the_template_refuses_is_an_error_with_its_place(chat):
    with pytest.raises(UsageError) as refusal:
        pieces(turns(("user", "a"), ("user", "b"), ("assistant", "c")), "chat.jsonl, record 3", chat(STRICT))
    place = "chat.jsonl, record 3: the chat template refuses this conversation"
    assert str(refusal.value).startswith(f"{place} (user, user, assistant): roles must alternate")
    broken = "{{ messages[0].nothing.at_all }}"
    with pytest.raises(UsageError, match="record 3: the chat template refuses"):
        pieces(TALK, "record 3", chat(broken))


def test_an_answer_that_the_template_leaves_out_is_an_error(chat):
    silent = "{% for m in messages if m.role == 'user' %}[{{ m.content }}]{% endfor %}"
    with pytest.raises(UsageError, match=r"record 1: .*does not show messages\[2\]"):
        pieces(TALK, "a.jsonl, record 1", chat(silent))


CALL = {
    "messages": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}],
        },
        {"role": "tool", "content": "rain", "tool_calls": None},
        {"role": "assistant", "content": "It rains."},
    ],
    "tools": '[{"type": "function", "function": {"name": "look"}}]',
}


def test_tool_calls_have_no_content(chat, bytewise):
    assert answers(CALL, chat(CHATML)) == ['<call>look {"at": "é"}</call><|end|>', "It rains.<|end|>"]
    assert whole(CALL, chat(CHATML)).startswith('<|tools|>[{"type": "function"')
    first, second = answers(CALL, bytewise)  # no template: the calls as JSON
    assert json.loads(first.removesuffix("<|end|>"))["function"] == {"name": "look", "arguments": {"at": "é"}}
    assert second == "It rains.<|end|>"


@pytest.mark.parametrize(
    "record",
    [
        turns(("user", [{"type": "text", "text": "On"}, {"type": "text", "text": "e?"}]), ("assistant", "yes")),
        {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "yes"}]},
        {"conversations": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "yes"}]},
        {"prompt": "One?", "completion": "yes", "messages": None},
        {"prompt": [{"role": "user", "content": "One?"}], "completion": [{"role": "assistant", "content": "yes"}]},
        {"instruction": "One?", "input": None, "output": "yes"},
        {"instruction": "One?", "input": "", "output": "yes", "text": "ignored"},
    ],
)
def test_every_form_is_the_same_conversation(chat, record):
    expected = turns(("user", "One?"), ("assistant", "yes"))
    assert pieces(record, "x", chat(CHATML)) == pieces(expected, "x", chat(CHATML))


def test_more_of_what_the_forms_hold(chat):
    tokenizer = chat(CHATML)
    alpaca = {"instruction": "Add.", "input": "1 2", "output": "three"}
    assert whole(alpaca, tokenizer).startswith("<|start|>user\nAdd.\n\n1 2<|end|>")
    share = {"system": "Be kind.", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert whole(share, tokenizer).startswith("<|start|>system\nBe kind.<|end|>")
    # of a prompt that is a conversation, only what comes after it is learnt
    listed = {"prompt": TALK["messages"][:4], "completion": TALK["messages"][4:]}
    assert answers(listed, tokenizer) == ["no<|end|>"]
    named = {"dialogue": {"turns": TALK["messages"]}}
    assert answers(named, tokenizer, "dialogue.turns") == ["yes<|end|>", "no<|end|>"]
    half = turns(("user", "\ud83d"), ("assistant", "\ude00!"))
    assert answers(half, tokenizer) == ["\ufffd!<|end|>"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (turns(("user", "a"), ("assistant", None)), "messages[1].content is null, not text; drop the record"),
        (turns(("user", 7), ("assistant", "a")), "messages[0].content is a number"),
        (turns(("user", [{"type": "image_url"}]), ("assistant", "a")), "a part of type image_url; only text is read"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "is from 'alien'; known are human"),
        ({"messages": "hello"}, "messages is a text, not a list"),
        ({"messages": ["hello"]}, "messages[0] is a text"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "so must be the answer"),
        ({"prompt": "a", "completion": None}, "no answer"),
        ({"prompt": "a", "completion": " \n"}, "'completion' is empty"),
        ({"prompt": "a", "completion": "<|end|>\n"}, "holds nothing but <|end|>"),
        (turns(("user", "a"), ("assistant", "  ")), "the assistant's turn messages[1] is empty"),
        ({"messages": None}, "found the fields messages, all null"),
        (turns(("user", "a"), ("critic", "b")), "no assistant turn, so nothing to learn; its roles are user, critic"),
        ({"text": "a"}, "found the fields text; a record holds instruction and output"),
        ({**CALL, "tools": 7}, "tools is a number"),
        ({"messages": [{"role": "assistant", "tool_calls": "x", "content": "a"}]}, "tool_calls is a text"),
    ],
)
def test_other_records_are_refused(bytewise, record, message):
    with pytest.raises(UsageError) as refusal:
        encode(record, "qa.jsonl, record 7", bytewise)
    assert str(refusal.value).startswith("qa.jsonl, record 7") and message in str(refusal.value)


@pytest.mark.parametrize("template", [None, CHATML, STRICT, BARE])
@pytest.mark.parametrize("end", ["<|end|>", "<|end|><|end|>", "<|end|>\n", " <|end|> "])
def test_an_answer_that_has_its_end_gets_no_second(chat, template, end):
    tokenizer = chat(template)
    for record in (
        {"prompt": "a", "answer": f"b{end}"},
        turns(("user", "a"), ("assistant", f"b{end}")),
        turns(("user", "a"), ("assistant", f"b{end}"), ("user", "a"), ("assistant", f"b{end}")),
    ):
        example = encode(record, "x", tokenizer)
        scored = tokenizer.decode(example.ids[example.answer].tolist()).replace(" ", "")
        assert scored in ("b<|end|>", "b<|end|>b<|end|>"), scored
        assert tokenizer.decode(example.ids.tolist()).replace(" ", "").rstrip().endswith("b<|end|>")


def test_tool_calls_that_the_template_leaves_out_are_an_error(chat):
    deaf = CHATML.replace("m.tool_calls or []", "[]")
    with pytest.raises(UsageError, match=r"the chat template leaves out the tool call 'look' in messages\[1\]"):
        pieces(CALL, "record 1", chat(deaf))
    mute = CHATML.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}")
    with pytest.raises(UsageError, match=r"record 1: the chat template leaves out messages\[2\]"):
        pieces(TALK, "record 1", chat(mute))
    loud = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
    assert answers(TALK, chat(loud)) == ["YES<|end|>", "NO<|end|>"]


def test_other_words_for_the_same(chat):
    tokenizer = chat(CHATML)
    expected = pieces(turns(("user", "a"), ("assistant", "b")), "x", tokenizer)
    for user, assistant in (("human", "gpt"), ("User", "Assistant"), ("prompter", "bot")):
        assert pieces(turns(("system", None), (user, "a"), (assistant, "b")), "x", tokenizer) == expected
    assert pieces({**turns(("user", "a"), ("assistant", "b")), "tools": ""}, "x", tokenizer) == expected
