"""Embeds batches of token ids with transformers, when asked on standard input; run by embeddings.py in another Python.

python embeddings_reference.py FOLDER NUM_TEXTS NUM_TOKENS BATCH_SIZE
"""

from __future__ import annotations

import sys
import time

import torch
from transformers import AutoModel


def main(folder: str, texts: int, tokens: int, batch: int) -> None:
    model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ids = torch.randint(0, 40_000, (texts, tokens), generator=torch.Generator().manual_seed(0))

    def embed() -> None:
        with torch.inference_mode():
            for some in ids.split(batch):
                mask = torch.ones_like(some)
                hidden = model(input_ids=some, attention_mask=mask, use_cache=False).last_hidden_state[:, -1]
                torch.nn.functional.normalize(hidden.float(), dim=-1).numpy()

    embed()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        embed()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
