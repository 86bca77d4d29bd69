"""Makes tests/fixtures/minilm.json: vectors and a retrieval of all-MiniLM-L6-v2, by sentence-transformers in float32.

Run in an environment that has sentence-transformers, with the model's folder:
`python tests/e2e/make_minilm_fixture.py ~/.cache/jaxserve/models/all-minilm-l6-v2`.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "minilm.json"
WORDS = ["river", "engine", "Straße", "café", "你好", "market", "violin", "2024", "e-mail", "théâtre", "мир", "signal"]
# Tokens of a text, with the two around it. The last one is longer than the model's limit, 256.
LENGTHS = [3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 192, 255, 256, 300]
ODD = ["a", "👩‍👩‍👧‍👦 🇩🇪", "İstanbul ﬁne ①", "tab\tnew\nline\x00\u200b", "a [SEP] b [PAD]", "x" * 120]
DOCUMENTS = [
    "The capital of France is Paris, a city on the Seine.",
    "Berlin has been the capital of reunified Germany since 1990.",
    "Mount Everest is the highest mountain above sea level.",
    "The Mariana Trench is the deepest part of the oceans.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "Mitochondria supply a cell with most of its chemical energy.",
    "DNA stores genetic information in sequences of four bases.",
    "Penicillin was the first antibiotic that was widely used.",
    "Vaccines train the immune system to recognize a pathogen.",
    "The heart pumps blood through arteries and veins.",
    "A balanced diet has vegetables, grains and protein.",
    "To bake bread, mix flour, water, salt and yeast, and let the dough rise.",
    "Risotto is made of short-grain rice that is stirred in broth.",
    "Espresso is brewed by forcing hot water through ground coffee.",
    "Green tea is not oxidized, unlike black tea.",
    "A violin has four strings that are tuned in fifths.",
    "Beethoven wrote nine symphonies, the last one with a choir.",
    "Jazz began in New Orleans and is known for improvisation.",
    "The Mona Lisa was painted by Leonardo da Vinci.",
    "Impressionists painted light outdoors with visible strokes.",
    "A binary search halves a sorted list in each step.",
    "A hash table finds a value by its key in constant time on average.",
    "Python is a programming language with dynamic types.",
    "Rust prevents data races at compile time.",
    "A database index makes queries faster and writes slower.",
    "Git keeps the history of a project's files in commits.",
    "The stock market fell after the central bank raised interest rates.",
    "Inflation is a general rise of prices over time.",
    "A mortgage is a loan that is secured by a house.",
    "Taxes on income are due in April in the United States.",
    "The football team won the final after extra time.",
    "A marathon is a run of 42.195 kilometres.",
    "Tennis players serve from behind the baseline.",
    "Chess is played on a board of 64 squares.",
    "The train to the airport leaves every fifteen minutes.",
    "Electric cars store energy in lithium-ion batteries.",
    "Solar panels turn sunlight into electricity.",
    "Wind turbines are taller at sea than on land.",
    "Glaciers are melting as the climate becomes warmer.",
    "Bees pollinate many of the plants that people eat.",
]
QUERIES = [
    "What is the capital of Germany?",
    "the highest peak on Earth",
    "how do plants make oxygen",
    "medicine against bacteria",
    "recipe for a loaf",
    "composer of a choral symphony",
    "fast lookup by key",
    "language without data races",
    "why did shares drop",
    "long-distance running",
    "renewable power from the sun",
    "insects that help crops grow",
]


def text_of_length(model: SentenceTransformer, tokens: int, rng: random.Random) -> str:
    text = "a"
    while len(model.tokenizer(text)["input_ids"]) < tokens:
        longer = f"{text} {rng.choice(WORDS)}"
        text = longer if len(model.tokenizer(longer)["input_ids"]) <= tokens else f"{text} a"
    return text


def encoded(vectors: np.ndarray) -> list[str]:
    return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]


if __name__ == "__main__":
    model = SentenceTransformer(sys.argv[1], device="cpu")
    texts = [text_of_length(model, tokens, random.Random(tokens)) for tokens in LENGTHS] + ODD
    scores = model.encode(QUERIES) @ model.encode(DOCUMENTS).T
    content = {
        "texts": texts,
        "num_tokens": [min(len(model.tokenizer(text)["input_ids"]), model.max_seq_length) for text in texts],
        "vectors": encoded(np.stack([model.encode(text) for text in texts])),
        "documents": DOCUMENTS,
        "queries": QUERIES,
        "ranking": np.argsort(-scores, axis=1, kind="stable").tolist(),
    }
    FIXTURE.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")
    print(content["num_tokens"], "closest scores", np.min(-np.diff(-np.sort(-scores, axis=1))))
