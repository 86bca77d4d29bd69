"""Reads which resources of a GPU kernels take, from a program that was compiled for one; needs no GPU.

`executable` finds the kernels, `riegeli` opens the files that hold them, `cubin` reads one kernel's machine code, and
`wire` the fields of protobuf messages. None of these formats is a promised interface. Anything that differs from what
jax 0.11.2 and 0.12 write raises `UnreadableError`; nothing is guessed.
"""
