"""The bundled text: ``pydoc_data.topics``, which every Python carries."""

from __future__ import annotations

import platform
from typing import Literal

BUNDLED = "bundled"
TRAINING_SHARE = 0.8
SHARED_PARAGRAPH = 100  # characters from which a paragraph of the held-out part counts as seen in training

Part = Literal["train", "heldout", "all"]


def bundled_name(part: Part) -> str:
    """Name the bundled text by its Python, on whose version its wording depends."""
    share = {"train": ", first 80%", "heldout": ", last 20%", "all": ""}[part]
    return f"pydoc_data.topics of Python {platform.python_version()}{share}"


def bundled_documents(part: Part) -> list[str]:
    """Return the topics in order of name. The held-out part drops paragraphs that the training part holds too: topics
    quote each other."""
    from pydoc_data.topics import topics

    texts = [topics[name].strip() + "\n\n" for name in sorted(topics)]
    if part == "all":
        return texts
    cut = int(TRAINING_SHARE * sum(map(len, texts)))
    train: list[str] = []
    heldout: list[str] = []
    at = 0
    for text in texts:
        if at + len(text) <= cut:
            train.append(text)
        elif at >= cut:
            heldout.append(text)
        else:
            inside = text.index("\n\n", cut - at) + 2  # a paragraph cut in two would escape the comparison below
            train.append(text[:inside])
            heldout.append(text[inside:])
        at += len(text)
    if part == "train":
        return train
    seen = {paragraph for text in train for paragraph in text.split("\n\n") if len(paragraph) >= SHARED_PARAGRAPH}
    return ["\n\n".join(paragraph for paragraph in text.split("\n\n") if paragraph not in seen) for text in heldout]
