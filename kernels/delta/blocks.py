"""Sizes that the chunks' kernels and those who call them agree on."""

KEY_BLOCK = 64  # keys that a program of the gradients takes at most; narrower keys are one block
