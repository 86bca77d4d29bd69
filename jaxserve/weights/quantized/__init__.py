"""Quantized weights: what checkpoints store, read as rows of numbers, and packed as a deployment holds them."""
