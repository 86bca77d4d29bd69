"""Writes a draft model: the first layers of a model, with its embedding, last norm and head, in bfloat16.

With all layers of the model, the draft model is the model itself without quantization.

    python -m benchmarks.first_layers FOLDER --layers 6
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve.config.schema import DEFAULT_MODEL
from jaxserve.model_source import read_config, resolve
from jaxserve.text.tokenizers.save import save_tokenizer
from jaxserve.weights import open_source


def write_first_layers(model: str, folder: Path, layers: int) -> None:
    """Write a folder in Hugging Face's form."""
    source = resolve(model)
    folder.mkdir(parents=True, exist_ok=True)
    config = {**read_config(source), "num_hidden_layers": layers, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    opened, tensors = open_source(source), {}
    for name, info in opened.infos.items():
        _, _, after = name.partition("model.layers.")
        if after and int(after.split(".")[0]) >= layers:
            continue
        tensors[name] = np.empty(info.shape, np.float32)
        opened.read(name, tuple(slice(0, size) for size in info.shape), tensors[name])
    save_file(
        {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    save_tokenizer(source, folder)


def main() -> int:
    """Write the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--layers", type=int, default=6)
    given = parser.parse_args()
    write_first_layers(given.model, given.folder, given.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
