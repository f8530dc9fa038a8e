"""Adapting a swapped model: a recipe's phases, from the teacher's hidden states to instructions.

    run.py         a run directory: apply, check everything, phase after phase, resume
    phases.py      one phase, from the model it starts with to the model it leaves
    trainer.py     transformers' Trainer with this project's batches, losses, dose and checkpoints
    distiller.py   the module that is trained: a batch in, the phase's loss out
    teaching.py    teacher and student in one model
    losses.py, schedules.py, packing.py, instruction.py    the parts, without any state of a run
"""
