"""Changes inputs: bytes, JSON values, lines of YAML. Each function draws from the generator that it is given."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 65535, 2**31, 10**9, 2**63, 10**30, -(10**9), 0.5, 1e308, -0.0,
    float("nan"), float("inf"), "", "x", "0", "-1", "1e9", "\u0000", "\ud7ff", "ä" * 50, "../../etc/passwd",
    "/dev/zero",
    [], [[]], [0], [None], ["x"], {}, {"a": 1}, {"": {}}, [1, [2, [3]]], ["linear_attention"] * 5, "full_attention",
    {"__float__": "Infinity"}, {"__float__": "x"}, {"__float__": []},
)  # fmt: skip
BROKEN = (b"", b"[" * 100_000, b'{"a":' * 50_000, b'{"a":' + b"9" * 6000 + b"}", b"\xff\xfe{}", b"null")
TOKENS = (
    "[", "]", "{", "}", ":", ",", "#", "&a", "*a", "!!python/object:os.system", "!x", "|", ">", "---", "...", "\t", "?",
    "null", "nan", ".inf", "1e400", "-1", "0", "99999999999999999999", "1_000", "0x10", "1M", "1.5k", "true", "'", '"',
    "<<", "%", "@", "`", "\u2028", "\ufeff", "é", "'\\ud800'", "[" * 60, "{a: " * 60,
    "hub:x/y", "bundled", "/dev/zero", "../",
)  # fmt: skip


def bend_bytes(rng: random.Random, data: bytes, times: int = 3) -> bytes:
    """Flip, cut, double, insert or remove bytes at a few places."""
    data = bytearray(data)
    for _ in range(rng.randint(1, times)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 2:
            del data[at : at + rng.randint(1, 16)]
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            part = data[at : at + rng.randint(1, 64)]
            data[at:at] = part
        else:
            data[at:at] = rng.choice(TOKENS).encode("utf-8", "surrogatepass")
    return bytes(data)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value inside a JSON document, the document itself left out."""
    found = []
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value[:50]):
            found += [(*path, key), *places(item, (*path, key))]
    return found


def bend_json(rng: random.Random, value: Any, most: int = 3) -> Any:
    """Replace, remove, rename, wrap or deepen a few of a document's values."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, most)):
        found = places(value)
        if not found:
            return rng.choice(STRANGE)
        *path, key = rng.choice(found)
        node = value
        for part in path:
            node = node[part]
        kind = rng.randrange(7)
        if kind <= 2:
            node[key] = copy.deepcopy(rng.choice(STRANGE))
        elif kind == 3:
            del node[key]
        elif kind == 4:
            node[key] = [node[key]]
        elif kind == 5 and isinstance(node, dict):
            node[rng.choice(("x", "", "text_config", "surgery", "ssm_cfg", "layer_types", key * 2))] = node.pop(key)
        else:
            for _ in range(rng.choice((5, 70, 500))):
                node[key] = {"a": node[key]}
    return value


def json_bytes(rng: random.Random, value: Any) -> bytes:
    """A bent document as bytes; now and then bent once more as bytes, or a text that no document gives."""
    kind = rng.randrange(12)
    if kind == 0:
        return rng.choice(BROKEN)
    data = json.dumps(bend_json(rng, value)).encode()
    return bend_bytes(rng, data) if kind == 1 else data


def bend_yaml(rng: random.Random, text: str) -> str:
    """Move, double, remove or break lines of a recipe, or put strange values after its keys."""
    lines = text.split("\n")
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(lines))
        kind = rng.randrange(8)
        if kind == 0:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif kind == 1 and len(lines) > 1:
            del lines[at]
        elif kind == 2:
            lines[at] = rng.choice(("  ", "\t", " ", "- ")) + lines[at]
        elif kind == 3 and ":" in lines[at]:
            lines[at] = f"{lines[at].split(':')[0]}: {rng.choice(TOKENS)}"
        elif kind == 4 and ":" in lines[at]:
            value = rng.choice(STRANGE)
            lines[at] = f"{lines[at].split(':')[0]}: {json.dumps(value)}"
        elif kind == 5:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + rng.choice(TOKENS) + lines[at][place:]
        elif kind == 6:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        else:
            place = rng.randrange(len(lines[at]) + 1)
            odd = rng.choice((0, 7, 0x85, 0xA0, 0x2028, 0xFFFE, rng.randrange(32, 0xD7FF)))
            lines[at] = lines[at][:place] + chr(odd)
    return "\n".join(lines)


def bend_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Change a safetensors file's length, header or bytes, mostly its header."""
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    kind = rng.randrange(6)
    if kind == 0:
        return struct.pack("<Q", rng.choice((0, 1, size - 1, size + 1, 2**40, 2**63, 2**64 - 1))) + data[8:]
    if kind == 1:
        return bend_bytes(rng, data)
    if kind == 2:
        return data[: rng.randrange(len(data))]
    if kind == 3:
        return data[:8] + bend_bytes(rng, data[8 : 8 + size]) + rest
    text = json_bytes(rng, header)
    return struct.pack("<Q", len(text)) + text + rest
