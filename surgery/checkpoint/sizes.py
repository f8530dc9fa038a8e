"""Holds the sizes that a config.json claims against the headers of its weights, before anything is built from them.

A configuration object lists its layers when it is made, so that ``num_hidden_layers: 1000000000`` alone takes all
memory. Nothing here knows a family: the keys that count or measure are known by their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from surgery.errors import UsageError

LAYERS = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
EMBEDDINGS = re.compile(r"(?:^|\.)(?:embed_tokens|embeddings?|word_embeddings)\.weight$")
ASIDE = re.compile(r"(?:^|\.)(?:mtp|visual|vision_tower|vision_model)\.")  # not the language model
LAYER_KEYS = re.compile(r"(?:num_hidden_layers|num_layers|n_layers?|num_mem_blocks)")
LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern", "mlp_layer_types")
SIZE_KEYS = re.compile(r"size|dim|heads|groups|experts|state|rank|kernel|conv|expand|inner|width|^d_|^n_|^num_")
OTHER_KEYS = re.compile(r"position|chunk|max_|length|window|token|param|step|sample|epoch|batch|theta")
WIDTHS = ("hidden_size", "d_model")
WHOLE = (*WIDTHS, "vocab_size", "num_heads", "head_dim", "num_attention_heads", "num_experts")
REMEDY = "config.json and the weights do not belong together"
NO_WEIGHTS = 4096  # layers, where no header tells
NO_SIZE = 1 << 22  # of anything else, where no header tells
USUAL = 1 << 16  # a size that costs nothing: keys of parts that a model lacks keep their defaults


def check_sizes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], place: str) -> None:
    """Refuse a configuration of more layers, or of larger ones, than the weights have.

    Args:
        shapes: the tensors' names on disk and shapes; empty where they are not known, when only sizes that no model
            has are refused.
        place: what the message calls the file.

    Raises:
        UsageError: naming the key, its value, and the headers' number.
    """
    shapes = {name: shape for name, shape in shapes.items() if not ASIDE.search(name)}
    layers = 1 + max((int(found[1]) for name in shapes if (found := LAYERS.search(name))), default=-1)
    most_layers = layers or NO_WEIGHTS
    counted = f"the weights' headers hold {layers} layers" if layers else f"no model has more than {NO_WEIGHTS} layers"
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    most = max(USUAL, largest) if largest else NO_SIZE
    held = f"no size in the weights' headers exceeds {largest}" if largest else "no model has a size like that"
    experts = 1 + max((int(found[1]) for name in shapes if (found := EXPERT.search(name))), default=-1)
    experts = max([experts, *(shape[0] for name, shape in shapes.items() if "expert" in name and shape)])
    tables = {shape for name, shape in shapes.items() if EMBEDDINGS.search(name) and len(shape) == 2}
    rows, width = next(iter(tables)) if len(tables) == 1 else (None, None)
    for name, key, value in _keys(config):
        if key in LISTS and isinstance(value, (list, str)) and len(value) > most_layers:
            raise _wrong(place, name, f"names {len(value)} layers", counted)
        if isinstance(value, list) and len(value) > most:
            raise _wrong(place, name, f"lists {len(value)} values", held)
        if value is not None and (LAYER_KEYS.fullmatch(key) or key in WHOLE) and not _is_count(value):
            raise UsageError(f"{place}: {name} is {str(value)[:40]!r}, not a whole number\n  {REMEDY}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if LAYER_KEYS.fullmatch(key):
            if value > most_layers:
                raise _wrong(place, name, f"is {value}", counted)
        elif key in WIDTHS and width is not None and value != width:
            raise _wrong(place, name, f"is {value}", f"the weights' headers hold embeddings of width {width}")
        elif key == "vocab_size" and rows is not None and not _fits(config, value, rows):
            raise _wrong(place, name, f"is {value}", f"the weights' headers hold embeddings of {rows} tokens")
        elif "experts" in key and experts and value > experts:
            raise _wrong(place, name, f"is {value}", f"the weights' headers hold {experts} experts")
        elif SIZE_KEYS.search(key) and not OTHER_KEYS.search(key) and value > most:
            raise _wrong(place, name, f"is {value}", held)
        if abs(value) >= 2**63 and value not in (float("inf"), float("-inf")):
            raise _wrong(place, name, f"is {str(value)[:24]}...", "no number there is that large")


def _keys(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Each key of the language model's: as messages name it, its last part, its value."""
    for key, value in config.items():
        if isinstance(value, dict) and key in ("text_config", "ssm_cfg", "attn_cfg"):
            yield from ((f"{key}.{inner}", str(inner), item) for inner, item in value.items())
        else:
            yield key, key, value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _fits(config: Mapping[str, Any], vocabulary: float, rows: int) -> bool:
    """mamba_ssm pads its vocabulary; elsewhere the numbers are equal."""
    padded = "ssm_cfg" in config or "pad_vocab_size_multiple" in config
    return vocabulary <= rows if padded else vocabulary == rows


def _wrong(place: str, key: str, problem: str, held: str) -> UsageError:
    return UsageError(f"{place}: {key} {problem}, but {held}\n  {REMEDY}")
