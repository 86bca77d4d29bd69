"""Reads what kernels take of a GPU out of a program that was compiled for one: it runs nothing, and needs no GPU.

`executable` finds the kernels, `riegeli` and `snappy` open what they are packed in, `cubin` reads one kernel's machine
code, and `wire` the bytes. None of this is an interface that somebody promised: what isn't as it was seen with jax
0.11.2 and 0.12 is `UnreadableError`, never a guess.
"""
