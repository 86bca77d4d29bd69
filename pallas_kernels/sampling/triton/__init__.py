"""The sampler of NVIDIA GPUs from Ampere on, by Pallas' Triton lowering: no sort, and no branch or loop in the program.

Each row is handled by programs of its own, which skip work that the row doesn't ask for.
"""

from pallas_kernels.sampling.triton.draw import draw_tokens
from pallas_kernels.sampling.triton.edit import edit_logits
from pallas_kernels.sampling.triton.logprobs import TopLogits, top_logits

__all__ = ["TopLogits", "draw_tokens", "edit_logits", "top_logits"]
