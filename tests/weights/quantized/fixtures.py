"""The quantized fixtures that scripts/make_quantized.py writes: their folders, the weights they stand for, and changed
copies of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.weights.hf import SafetensorsFolder

Tensors = dict[str, np.ndarray[Any, Any]]

QUANTIZED = Path(__file__).parents[2] / "fixtures" / "quantized"
MODELS = sorted(path.parent.name for path in QUANTIZED.glob("*/golden.npz"))


def dequantized(name: str) -> dict[str, np.ndarray]:
    """Return the float32 weights of the first 8 outputs of each quantized linear layer of the first decoder layer, by
    the names of the 16-bit checkpoint; of `gpt_oss_mxfp4`, its experts in full."""
    with np.load(QUANTIZED / name / "dequantized.npz") as arrays:
        return dict(arrays)


def changed(name: str, folder: Path, change: Callable[[Tensors], object] | None = None, **config: Any) -> Path:
    """Copy a fixture with other tensors, or other fields of its `quantization_config`."""
    shutil.copytree(QUANTIZED / name, folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(raw))
    if change is not None:
        opened = SafetensorsFolder(QUANTIZED / name)
        tensors = {key: opened.array(key) for key in opened.infos}
        change(tensors)
        save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / "model.safetensors")
    return folder
