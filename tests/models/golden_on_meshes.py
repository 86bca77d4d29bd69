"""Run by test_golden_on_meshes.py where jax sees four CPU devices: the golden fixtures' logits, split over these.

Arguments are FOLDER/SHARDS. Prints one JSON object: for each the largest difference to Hugging Face's logits, or null
if the fixture can't be split into that number of shards.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from tests.models.golden import golden_config, golden_logits


def difference(case: str) -> float | None:
    """Return the largest difference of any logit of a fixture."""
    name, shards = case.split("/")
    if not golden_config(name).splits_into(int(shards)):
        return None
    return max(float(np.abs(logits - expected).max()) for logits, expected in golden_logits(name, int(shards)))


if __name__ == "__main__":
    print(json.dumps({case: difference(case) for case in sys.argv[1:]}))
