"""The quantized fixtures that scripts/make_quantized.py writes: their folders, and the weights they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

QUANTIZED = Path(__file__).parents[2] / "fixtures" / "quantized"
MODELS = sorted(path.parent.name for path in QUANTIZED.glob("*/golden.npz"))


def dequantized(name: str) -> dict[str, np.ndarray]:
    """Return the float32 weights of the first 8 outputs of each quantized linear layer of the first decoder layer, by
    the names of the 16-bit checkpoint; of `mxfp4`, its one tensor in full."""
    with np.load(QUANTIZED / name / "dequantized.npz") as arrays:
        return dict(arrays)
