"""Adapting a swapped model: a recipe's phases, from the teacher's hidden states to instructions.

    run.py         a run directory: apply, check everything, phase after phase, resume
    phases.py      one phase, from the model it starts with to the model it leaves
    trainer.py     the steps of a phase: batches, losses, dose, checkpoints, over accelerate
    distiller.py   the module that is trained: a batch in, the loss of the objective out
    objectives/    what a phase learns from: one class a kind of phase
    teaching.py    teacher and student in one model
    losses.py, schedules.py, batches.py    the parts, without any state of a run
"""
