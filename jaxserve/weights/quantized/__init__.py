"""Reads quantized weights of checkpoints as rows of numbers, and packs them as a deployment holds them."""
