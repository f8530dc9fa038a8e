"""Adapting a swapped model: a recipe's phases, from the teacher's hidden states to instructions.

    run.py         a run directory: apply, check everything, phase after phase, resume
    phases.py      one phase, from the model it starts with to the model it leaves
    trainer.py     the steps of a phase: batches, losses, dose, checkpoints, over accelerate
    distiller.py   the module that is trained: a batch in, the phase's loss out
    teaching.py    teacher and student in one model
    losses.py, schedules.py, batches.py    the parts, without any state of a run
"""
