"""Run by test_golden_on_meshes.py where jax sees four CPU devices: the golden fixtures' logits, split over these.

Arguments are FOLDER/SHARDS, or FOLDER/SHARDS/GROUPS/RANKS for groups with experts of their own, and ranks that divide
them (see `golden_logits`). Prints one JSON object: for each the largest difference to Hugging Face's logits, or null
if the fixture can't be split into that number of shards. A quantized fixture has its weights in rows, in float32; with
`packed:` before its name, packed for a CPU in bfloat16, and it is compared with the same on one device. `gguf:` before
a name makes a GGUF file of it; `pooled:` before one compares the vectors of a fixture of pooled requests.
"""

from __future__ import annotations

import json
import re
import sys

import numpy as np

from tests.models.golden import golden_config, golden_logits
from tests.models.pooled import pooled_difference
from tests.models.quantized import held_logits


def difference(case: str) -> float | None:
    """Return the largest difference of any logit of a fixture."""
    if case.startswith("pooled:"):
        name, number = case.removeprefix("pooled:").split("/")
        return pooled_difference(name, int(number))
    called, shards, *mesh = re.fullmatch(r"(.*?)/(\d)(?:/(\d)/(\d))?", case).groups()
    if mesh[0] and "quantized/" not in called:
        found = golden_logits(called, int(shards), expert=int(mesh[0]), ranks=int(mesh[1]))
        return max(float(np.abs(logits - expected).max()) for logits, expected in found)
    name = called.removeprefix("packed:")
    if not golden_config(name).splits_into(int(shards)):
        return None
    if called != name:
        one, several = (held_logits(name, "packed", count)[1] for count in (1, int(shards)))
        return float(np.abs(one - several).max())
    if "quantized/" in name:
        _, logits, expected = held_logits(name, "rows", int(shards), dtype=np.float32, expert=int(mesh[0] or 1))
        return float(np.abs(logits - expected).max())
    return max(float(np.abs(logits - expected).max()) for logits, expected in golden_logits(name, int(shards)))


if __name__ == "__main__":
    print(json.dumps({case: difference(case) for case in sys.argv[1:]}))
