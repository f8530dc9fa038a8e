"""Conversations as text, prompts and answers apart, through the tokenizer's chat template where it has one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from surgery.data.conversations import Conversation, Message, conversation
from surgery.data.rows import clean, clean_values
from surgery.errors import UsageError


class Piece(NamedTuple):
    """A stretch of text and whether it is an answer."""

    text: str
    answer: bool


class _Refusal(Exception):
    """A chat template's, with its words."""


def pieces(record: Mapping[str, Any], place: str, tokenizer: Any = None, column: str | None = None) -> list[Piece]:
    """A record's text, prompt and answer apart.

    Args:
        record: of one of the forms of :mod:`surgery.data.conversations`.
        place: file and record, for errors.
        tokenizer: its chat template writes the text, where it has one.
        column: the field that holds the messages, where it was named.

    Raises:
        UsageError: another form, a field that is not text, no answer, or a conversation that the template refuses.
    """
    found = conversation(record, place, column)
    token = getattr(tokenizer, "eos_token", None)
    for number in found.answers:  # some data sets write the end themselves
        message = found.messages[number]
        if message["content"].strip() and not _unended(message["content"], token) and not message.get("tool_calls"):
            raise UsageError(f"{place}: an answer holds nothing but {token}; drop the record")
    if getattr(tokenizer, "chat_template", None):
        return _templated(found, place, tokenizer)
    if found.plain is not None:
        prompt, answer = found.plain
        return [Piece(clean(prompt), False), Piece(clean(_unended(answer, token)), True)]
    end = token or "\n\n"
    parts = []
    for number, message in enumerate(found.messages):
        answer = number in found.answers
        content = _unended(message["content"], token) if answer else message["content"]
        if calls := message.get("tool_calls"):
            content = "\n".join(filter(None, [content, *(json.dumps(call, ensure_ascii=False) for call in calls)]))
        parts.append(Piece(f"{message['role'].capitalize()}:\n", False))
        parts.append(Piece(clean(content) + (end if answer else "\n\n"), answer))
    return parts


def _unended(text: str, token: str | None) -> str:
    """A text without the end tokens that it closes with, and the white space behind each."""
    while token and text.rstrip().endswith(token):
        text = text.rstrip().removesuffix(token)
    return text


def special_texts(tokenizer: Any) -> list[str]:
    """The special tokens as they stand in a text, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {str(token) for token in added if token.special} | set(getattr(tokenizer, "all_special_tokens", ()))
    return sorted(filter(None, found), key=len, reverse=True)


def _templated(found: Conversation, place: str, tokenizer: Any) -> list[Piece]:
    """The text that the chat template makes of the whole conversation, cut where each answer begins and ends."""
    messages = clean_values(found.messages)

    def render(part: list[Message], prompt: bool = False) -> str:
        try:
            return tokenizer.apply_chat_template(
                part, tools=found.tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template's own words come as jinja's errors, its slips as any of Python's
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise _Refusal(reason) from None

    try:
        whole = render(messages)
    except _Refusal as refusal:
        roles = ", ".join(message["role"] for message in messages[:6]) + (", ..." if len(messages) > 6 else "")
        raise UsageError(
            f"{place}: the chat template refuses this conversation ({roles}): {refusal}\n"
            "  change or drop the record, or give the tokenizer a template that takes it"
        ) from None
    specials = special_texts(tokenizer)
    parts: list[Piece] = []
    at = 0
    for number in found.answers:
        span = _by_prompt(messages, number, whole, render) or _by_change(messages, number, whole, render)
        if span is None or span[0] < at or span[0] >= span[1]:
            raise UsageError(
                f"{place}: what the chat template makes of the conversation does not show messages[{number}], so its "
                "answer cannot be told apart\n  drop the record, or give prompt and answer instead"
            )
        start, stop = span[0], _end_of(whole, *span, specials)
        _require_all(messages, number, whole, start, stop, render, place)
        answer = _ended_once(whole[start:stop], tokenizer.eos_token, specials)
        parts += [Piece(whole[at:start], False), Piece(answer, True)]
        at = stop
    parts.append(Piece(whole[at:], False))
    return [piece for piece in parts if piece.text]


def _require_all(
    messages: list[Message], number: int, whole: str, start: int, stop: int, render: Any, place: str
) -> None:
    """Refuse an answer of which the template leaves out the tool calls, or all.

    Raises:
        UsageError: what is left would be learnt as the answer.
    """
    shown, message = whole[start:stop], messages[number]
    names = [call.get("function", call).get("name") for call in message.get("tool_calls") or ()]
    missing = [name for name in names if isinstance(name, str) and name not in shown]
    silent = not names and message["content"].strip() not in shown and not _by_change(messages, number, whole, render)
    if missing or silent:
        what = f"the tool call {missing[0]!r} in messages[{number}]" if missing else f"messages[{number}]"
        raise UsageError(
            f"{place}: the chat template leaves out {what}\n"
            "  drop the record, or give the tokenizer a template that writes it"
        )


def _ended_once(answer: str, end: str | None, specials: list[str]) -> str:
    """An answer without the end tokens that stand before the one by which the template closes it."""
    last = next((special for special in specials if answer.endswith(special)), None)
    if not end or last is None:
        return answer
    return re.sub(rf"(?:{re.escape(end)}\s*)+$", "", answer.removesuffix(last)) + last


def _by_prompt(messages: list[Message], number: int, whole: str, render: Any) -> tuple[int, int] | None:
    """An answer's characters: from what asks for it on. None where the template writes a part of the conversation in
    another way than it stands in the whole, as those do that drop earlier thoughts."""
    try:
        asked, answered = render(messages[:number], True) if number else "", render(messages[: number + 1])
    except _Refusal:
        return None
    if not number or not (answered.startswith(asked) and whole.startswith(answered)):
        return None
    return len(asked), len(answered)


def _by_change(messages: list[Message], number: int, whole: str, render: Any) -> tuple[int, int] | None:
    """An answer's characters: those that change when the answer is another."""
    other = "\ue000\ue001" if "\ue000" not in whole else "\ue002\ue003"
    changed: Message = {**messages[number], "content": other}
    if "reasoning_content" in changed:
        changed["reasoning_content"] = other
    plain = {"role": changed["role"], "content": other}
    for message in (plain, changed):  # without its tool calls a tool's answer may have no place
        try:
            text = render([*messages[:number], message, *messages[number + 1 :]])
        except _Refusal:
            continue
        if other not in text:
            continue
        start = _shared(whole, text)
        return start, len(whole) - _shared(whole[start:][::-1], text[start:][::-1])
    return None


def _shared(one: str, other: str) -> int:
    """How many characters two texts share at their beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _end_of(whole: str, start: int, stop: int, specials: list[str]) -> int:
    """Where an answer ends: behind the special token that ends its turn, before white space that follows it."""
    text = whole[start:stop].rstrip()
    if any(text.endswith(special) for special in specials):
        return start + len(text)
    rest = whole[stop:]
    lead = len(rest) - len(rest.lstrip())
    for special in specials:
        if rest.startswith(special, lead):
            return stop + lead + len(special)
    return stop
