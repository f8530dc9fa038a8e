"""Instruction records: what a conversation is called in the data sets that people have, as one form.

    {"messages": [{"role": ..., "content": ...}, ...]}           also with tools and tool_calls
    {"conversations": [{"from": "human", "value": ...}, ...]}    ShareGPT, with or without a system field
    {"prompt": ..., "completion": ...}                           texts or lists of messages; the answer also under
                                                                 answer, response or output
    {"instruction": ..., "input": ..., "output": ...}            alpaca; input may be absent, null or empty
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surgery.data.rows import field as field_of
from surgery.data.rows import shown_fields, shown_kind
from surgery.errors import UsageError

ANSWER_KEYS = ("answer", "completion", "response", "output")
FORMS = "instruction and output, prompt and answer, messages, or conversations"
SPEAKERS = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "assistant", "bot", "chatgpt", "model", "bing", "bard"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
}

# of a speaker named as a role; the others stay as they are, for the chat template
ROLES = {name: role for name, role in SPEAKERS.items() if role in ("user", "system")}
ROLES |= dict.fromkeys(("gpt", "assistant", "bot", "chatgpt", "model"), "assistant")

BESIDE_CONTENT = ("tool_calls", "reasoning_content")  # what an answer may say instead

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """One record.

    Attributes:
        messages: {role, content, ...}, every content a text.
        answers: the numbers of the messages that are answers.
        tools: the record's tool descriptions, for a chat template.
        plain: prompt and answer as texts that need no template, of records that are no list of messages.
    """

    messages: list[Message]
    answers: list[int]
    tools: Any = None
    plain: tuple[str, str] | None = field(default=None)


def conversation(record: Mapping[str, Any], place: str, column: str | None = None) -> Conversation:
    """A record of any of the module's forms.

    Args:
        place: file and record, for errors.
        column: the field that holds the list of messages, where it was named.

    Raises:
        UsageError: another form, a field that is not text, no answer.
    """
    whole = record
    record = {key: value for key, value in record.items() if value is not None}  # tables fill up with nulls
    tools = _tools(record, place)
    if column is not None:
        try:
            record = {"messages": field_of(record, column)}
        except KeyError:
            raise UsageError(f"{place}: has no field {column!r}, only {shown_fields(record)}") from None
    for key in ("messages", "conversations", "conversation"):
        if key in record:
            return _listed(record, key, place, tools)
    if isinstance(record.get("prompt"), list):
        key = next((key for key in ANSWER_KEYS if isinstance(record.get(key), list)), None)
        if key is None:
            raise UsageError(f"{place}: prompt is a list of messages, and so must be the answer under completion")
        before, after = (_messages(record[name], name, place) for name in ("prompt", key))
        return _answered(before + after, place, key, tools, first=len(before))
    if "instruction" in record:
        question, context = _text(record, "instruction", place), ""
        if record.get("input"):
            context = _text(record, "input", place)
        prompt = f"Instruction:\n{question}\n\n" + (f"Input:\n{context}\n\n" if context else "") + "Answer:\n"
        question += f"\n\n{context}" if context else ""
    elif "prompt" in record:
        prompt = question = _text(record, "prompt", place)
    else:
        raise UsageError(
            f"{place}: found the fields {shown_fields(record or whole)}{'' if record else ', all null'}; "
            f"a record holds {FORMS}\n"
            "  name the field that holds the messages, as {path: ..., column: FIELD}, or rename the fields"
        )
    key = next((key for key in ANSWER_KEYS if key in record), None)
    if key is None:
        raise UsageError(f"{place}: no answer; a record holds {FORMS}")
    answer = _text(record, key, place)
    if not answer.strip():
        raise UsageError(f"{place}: the answer under {key!r} is empty; drop the record")
    system = [{"role": "system", "content": record["system"]}] if isinstance(record.get("system"), str) else []
    messages = [*system, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(messages, [len(messages) - 1], tools, plain=(prompt, answer))


def _listed(record: Mapping[str, Any], key: str, place: str, tools: Any) -> Conversation:
    messages = _messages(record[key], key, place)
    if isinstance(record.get("system"), str) and record["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": record["system"]})
    return _answered(messages, place, key, tools)


def _answered(messages: list[Message], place: str, key: str, tools: Any, first: int = 0) -> Conversation:
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number >= first]
    if not answers:
        roles = shown_fields(dict.fromkeys(message["role"] for message in messages))
        raise UsageError(f"{place}: {key} holds no assistant turn, so nothing to learn; its roles are {roles}")
    for number in answers:
        if not any(str(messages[number].get(part) or "").strip() for part in ("content", *BESIDE_CONTENT)):
            raise UsageError(f"{place}: the assistant's turn {key}[{number - first}] is empty; drop the record")
    return Conversation(messages, answers, tools)


def _messages(value: Any, key: str, place: str) -> list[Message]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # a table's cell
        value = _parsed(value)
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else shown_kind(value)
        raise UsageError(f"{place}: {key} is {found}, not a list of {{role, content}}")
    found = [_message(item, f"{key}[{number}]", place) for number, item in enumerate(value) if not _is_unsaid(item)]
    if not found:
        raise UsageError(f"{place}: {key} holds no message but an empty system one; drop the record")
    return found


def _is_unsaid(item: Any) -> bool:
    """Whether a message is a system prompt of null, which stands for none."""
    if not isinstance(item, Mapping) or item.get("role", item.get("from")) != "system":
        return False
    return item.get("content") is None and item.get("value") is None


def _message(item: Any, where: str, place: str) -> Message:
    if not isinstance(item, Mapping):
        raise UsageError(f"{place}: {where} is {shown_kind(item)}, which is not {{role, content}}")
    message = {key: value for key, value in item.items() if value is not None}
    if "role" not in message and "from" in message:
        speaker = str(message.pop("from"))
        if speaker.lower() not in SPEAKERS:
            raise UsageError(f"{place}: {where} is from {speaker!r}; known are {', '.join(SPEAKERS)}")
        message["role"] = SPEAKERS[speaker.lower()]
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str):
        raise UsageError(f"{place}: {where} holds {shown_fields(item)}, which is not {{role, content}}")
    message["role"] = ROLES.get(message["role"].lower(), message["role"])
    calls = message.get("tool_calls") or None
    message.pop("tool_calls", None)
    if calls is not None:
        message["tool_calls"] = _calls(calls, where, place)
    message["content"] = _content(message.get("content"), calls is not None, where, place)
    return message


def _content(value: Any, calls: bool, where: str, place: str) -> str:
    if value is None and calls:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list):
        texts = []
        for part in value:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
                texts.append(part["text"])
            else:
                kind = part.get("type", "another") if isinstance(part, Mapping) else shown_kind(part)
                raise UsageError(f"{place}: {where}.content holds a part of type {kind}; only text is read")
        return "".join(texts)
    found = "null" if value is None else shown_kind(value)
    raise UsageError(f"{place}: {where}.content is {found}, not text; drop the record, or write a text")


def _calls(value: Any, where: str, place: str) -> list[Any]:
    """Tool calls with their arguments as mappings, as chat templates take them; some data sets hold them as JSON."""
    calls = _parsed(value)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UsageError(f"{place}: {where}.tool_calls is {shown_kind(value)}, not a list of calls")
    found = []
    for call in calls:
        call = dict(call)
        inner = call["function"] = dict(call["function"]) if isinstance(call.get("function"), Mapping) else None
        if inner is None:
            del call["function"]
            inner = call
        if isinstance(inner.get("arguments"), str):
            inner["arguments"] = _parsed(inner["arguments"])
        found.append(call)
    return found


def _tools(record: Mapping[str, Any], place: str) -> Any:
    tools = _parsed(record.get("tools")) or None
    if tools is not None and not isinstance(tools, list):
        raise UsageError(f"{place}: tools is {shown_kind(tools)}, not a list of descriptions")
    return tools


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _text(record: Mapping[str, Any], key: str, place: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise UsageError(f"{place}: {key!r} is {shown_kind(value)}, not text")
    return value
