"""Tell tied heads by the weights: a configuration may call a head tied that the checkpoint holds on its own.

transformers ties two tensors only where the checkpoint holds one of them, or both with the same values. A head of its
own beside ``tie_word_embeddings: true`` is loaded as it is, and so it is treated here from apply to export.
"""

from __future__ import annotations

from collections.abc import Mapping

from surgery.checkpoint.reading import Checkpoint


def held_ties(checkpoint: Checkpoint, ties: Mapping[str, str]) -> dict[str, str]:
    """Return those of the configuration's ``ties``, name -> the name whose tensor it shares, which hold."""
    return {name: source for name, source in ties.items() if not is_own(checkpoint, name, source)}


def is_own(checkpoint: Checkpoint, name: str, source: str) -> bool:
    """Return whether ``checkpoint`` holds both tensors, with different values."""
    import torch

    if name not in checkpoint.tensors or source not in checkpoint.tensors:
        return False
    if checkpoint.tensors[name].shape != checkpoint.tensors[source].shape:
        return True
    return not torch.equal(checkpoint.read(name), checkpoint.read(source))


def own_head(checkpoint: Checkpoint, ties: Mapping[str, str]) -> str | None:
    """Return one line about a head that the configuration calls tied and the weights do not, or None."""
    for name, source in ties.items():
        if is_own(checkpoint, name, source):
            return (
                f"{checkpoint.directory}: config.json ties {name} to {source}, but the weights hold other values: it "
                "is kept as a head of its own, as transformers loads it"
            )
    return None
