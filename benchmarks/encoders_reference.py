"""Embeds sets of texts with sentence-transformers, when asked on standard input; run by encoders.py in another Python.

python encoders_reference.py FOLDER DTYPE TEXTS.json VECTORS.npy
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

BATCH = 32


def main(folder: str, dtype: str, texts_file: str, vectors: str) -> None:
    texts = json.loads(Path(texts_file).read_text())
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        found = model.encode(texts[line.strip()], batch_size=BATCH, show_progress_bar=False, convert_to_tensor=True)
        seconds = time.perf_counter() - start
        np.save(vectors, found.float().numpy())
        print(seconds, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
