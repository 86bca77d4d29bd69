"""The draw on a device without a sampler of its own: a kernel on a CPU, else plain XLA."""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels.cpu import kernel_or_fallback
from pallas_kernels.sampling import cpu, reference


def draw_tokens(
    logits: Float[Array, "rows vocab"],
    keys: UInt32[Array, "rows 2"],
    temperature: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    live: Bool[Array, " rows"] | None = None,
) -> Int[Array, " rows"]:
    """Compute `reference.draw_tokens`."""
    arguments = (logits, keys, temperature, top_k, top_p, min_p, live)
    return kernel_or_fallback(cpu.draw_tokens, reference.draw_tokens, *arguments)
