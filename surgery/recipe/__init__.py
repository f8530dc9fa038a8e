"""The recipe: what a user writes, read strictly.

``load_recipe("demo-bayesian")`` or ``load_recipe("my.yaml", ["phases.0.tokens=1M"])`` gives a checked :class:`Recipe`.
"""

from surgery.recipe.loading import load_recipe, locate, shipped
from surgery.recipe.schema import Dose, LayerChoice, Memory, Phase, Rates, Recipe, Source

__all__ = [
    "Dose",
    "LayerChoice",
    "Memory",
    "Phase",
    "Rates",
    "Recipe",
    "Source",
    "load_recipe",
    "locate",
    "shipped",
]
