"""What recall documents and needle measurements are written in: keys, values, and the needle's sentences.

Keys are ``adjective-noun``. The draws and the wording also make the recall documents that the bundled bases were
trained on (``surgery.pretraining.documents``).
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence

from surgery.errors import UsageError

KINDS = ("numbers", "words", "uuids")
DIGITS = 7

_ADJECTIVES = """
able amber ancient autumn bitter blue bold brass brave bright brisk broken calm careful clear clever cold common
cool crimson curious damp daring dark deep distant dry dusty eager early easy empty even faint fair faithful famous
fast fierce final fine firm flat fond free fresh frozen full gentle gilded glad golden grand gray great green happy
hard heavy hidden high hollow honest humble idle iron jolly keen kind large late lazy level light little lively lone
long loud loyal lucky mellow mild modest narrow near noble odd old open pale patient plain polite proud quaint quick
quiet rapid rare red rich ripe rough round royal rustic safe salty shallow sharp silent silver simple slow small
smooth
"""

_NOUNS = """
acorn anchor apple arrow badger barley basin beacon bell bench birch bird boat bottle bridge brook bucket button
cabin candle canyon castle cedar chapel cherry cliff clock cloud coast comet copper coral cottage cradle creek crown
desert door dragon drum eagle engine falcon farm feather fern field fire flag flower forest fort fountain fox garden
gate glacier glass goose grape grove hammer harbor hawk hedge helmet heron hill hornet horse island jacket jewel
journal kettle kite ladder lake lantern lark leaf lemon letter lion lock lodge maple market meadow mill mirror moon
moss mountain needle nest oak ocean olive orchard otter owl palace pebble pepper pigeon pine planet pond prairie
quarry rabbit raven reef
"""

ADJECTIVES = _ADJECTIVES.split()
NOUNS = _NOUNS.split()


def draw_words(rng: random.Random) -> str:
    """An adjective and a noun, joined by a hyphen."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def draw_value(rng: random.Random, kind: str) -> str:
    """A value of ``kind``: a number of 7 digits, two words, or a version-4 UUID."""
    if kind == "numbers":
        return str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    if kind == "words":
        return draw_words(rng)
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    raise UsageError(f"needle kind {kind!r}: choose one of {', '.join(KINDS)}")


def statement(kind: str, key: str, value: str) -> str:
    """The needle: RULER's sentence."""
    return f"One of the special magic {kind} for {key} is: {value}."


def introduction(kind: str) -> str:
    """The line above the haystack."""
    return f"Special magic {kind} are hidden in this text. Remember them.\n"


def question(kind: str, key: str) -> str:
    """The question after the haystack and the start of its answer; the value follows after a space."""
    return f"\nWhat is the special magic {kind[:-1]} for {key}? The special magic {kind[:-1]} for {key} is:"


def listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b, and c``."""
    if len(items) < 3:
        return " and ".join(items)
    return ", ".join(items[:-1]) + f", and {items[-1]}"


def plural_question(kind: str, keys: Sequence[str]) -> str:
    """The same where several values are asked for; they follow after a space, as :func:`listed`."""
    asked = f"the special magic {kind} for {listed(keys)}"
    return f"\nWhat are all {asked}? In the order of the text, {asked} are:"
