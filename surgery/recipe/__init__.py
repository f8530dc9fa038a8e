"""The recipe: what a user writes, read strictly.

``load_recipe("demo-bayesian")`` or ``load_recipe("my.yaml", ["phases.0.tokens=1M"])`` gives a checked :class:`Recipe`.
"""

from surgery.recipe.loading import load_recipe, locate, shipped
from surgery.recipe.schema import Dose, LayerChoice, Memory, Phase, Rates, Recipe, Source
from surgery.recipe.sizes import format_bytes, format_count, parse_bytes, parse_count

__all__ = [
    "Dose",
    "LayerChoice",
    "Memory",
    "Phase",
    "Rates",
    "Recipe",
    "Source",
    "format_bytes",
    "format_count",
    "load_recipe",
    "locate",
    "parse_bytes",
    "parse_count",
    "shipped",
]
