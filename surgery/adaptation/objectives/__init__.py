"""What a phase learns from: one class a kind of phase, named by one line in :mod:`surgery.recipe.kinds`.

A class says what its phases read, whether they have a teacher, which options they take, and what their loss is. The
recipe's checks, the data, the trainer and the reports ask the class; nothing else knows a kind by its name. These
modules import torch where they compute, so that a recipe is checked without it.
"""

from surgery.adaptation.objectives.base import Objective as Objective
