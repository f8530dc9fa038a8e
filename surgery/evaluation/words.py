"""Words from which recall documents and needle measurements draw keys and values, as ``adjective-noun``."""

from __future__ import annotations

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
