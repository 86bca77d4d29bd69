"""Products of quantized weights on NVIDIA GPUs, by Pallas' Triton lowering."""
