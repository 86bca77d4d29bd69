"""Creates the golden fixtures: tiny random checkpoints with Hugging Face's logits, and SmolLM2's greedy tokens.

Owns the weights and logits in `tests/fixtures/golden/*`, and `tests/fixtures/smollm2_greedy.json`. It doesn't use
jaxserve, because jaxserve is tested against them. It needs torch, so it runs in a separate environment (a small torch
exists for 3.11 only):

    PYENV_VERSION=3.11.7 python3 -m venv .venv-ref
    .venv-ref/bin/pip install torch==2.13.0 "transformers>=5.23,<6" safetensors gguf accelerate
    .venv-ref/bin/python scripts/make_golden.py gemma2 phi3            # the tiny models of these folders
    .venv-ref/bin/python scripts/make_golden.py --gguf SmolLM2.gguf    # SmolLM2's greedy tokens

A new fixture is a folder with a `config.json`, as a checkpoint on the hub would have it, and a `without.json`: changes
of its fields, each of which must alter the logits, so that a fixture whose feature has no effect is an error. Hugging
Face reads every folder back from its files, so the logits belong to exactly the config.json and weights there.
"""

from __future__ import annotations

import argparse
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
)

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
LENGTHS = (5, 13, 48)
# Model types that Hugging Face doesn't know, of checkpoints that come with code of another model
SAME_AS = {"kimi_k2": "deepseek_v3"}
# Model types whose checkpoints on the hub have one tensor for all experts of a layer, unlike those that transformers
# writes
STACKED = {"qwen3_5_moe"}


def random_weights(model: torch.nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return weights large enough that every part of the model affects the logits: norms and scalars near their start,
    biases not zero."""
    weights = {}
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
        if ("norm" in name and name.endswith("weight")) or name.endswith("layer_scalar"):
            weights[name] = value.float() + 0.3 * noise
        elif name.endswith("A_log"):  # Some heads of a delta net forget at once, others hardly
            weights[name] = 2 * noise - 2
        elif "embed_tokens" in name:
            weights[name] = noise if "lm_head.weight" in model.state_dict() and not tied(model) else 0.5 * noise
        else:
            weights[name] = 0.25 * noise
    if tied(model):
        weights["lm_head.weight"] = weights[next(name for name in weights if name.endswith("embed_tokens.weight"))]
    return weights


def tied(model: torch.nn.Module) -> bool:
    """Return whether the head is the embedding."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def save(model: torch.nn.Module, folder: Path, *, sharded: bool) -> None:
    """Write the weights under the names that checkpoints on the hub have, and keep the folder's config.json."""
    config = (folder / "config.json").read_bytes()
    renamed = model.config.model_type not in STACKED
    model.save_pretrained(folder, max_shard_size="30KB" if sharded else "1GB", save_original_format=renamed)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_bytes(config)


def with_changes(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a config with changed fields; in objects, only the fields that are named change, and null removes one."""
    changed = dict(raw)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(raw.get(key), dict)
        changed[key] = with_changes(raw[key], value) if both else value
    return {key: value for key, value in changed.items() if value is not None or key == "sliding_window"}


def config_of(raw: dict[str, Any]) -> PreTrainedConfig:
    """Return Hugging Face's config of a config.json."""
    return AutoConfig.for_model(**raw | {"model_type": SAME_AS.get(raw["model_type"], raw["model_type"])})


def model_class(raw: dict[str, Any]) -> Any:
    """Return the class that makes the model of a config.json: with its encoder of images, if it has one."""
    has_encoder = raw["architectures"][0].endswith("ForConditionalGeneration")
    return AutoModelForImageTextToText if has_encoder else AutoModelForCausalLM


def read_back(
    folder: Path, weights: dict[str, torch.Tensor] | None = None, changes: dict[str, Any] | None = None
) -> torch.nn.Module:
    """Load the folder with Hugging Face, in float32 with eager attention; or `weights` with a changed config."""
    raw = json.loads((folder / "config.json").read_text())
    if weights is not None:
        config = config_of(with_changes(raw, changes or {}))
        model = model_class(raw).from_config(config, dtype=torch.float32, attn_implementation="eager")
        known = model.state_dict().keys()
        model.load_state_dict({k: v.float() for k, v in weights.items() if k in known}, strict=False)
        return model.eval()
    model, info = model_class(raw).from_pretrained(
        folder, config=config_of(raw), dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Return the logits of every position, one sequence at a time."""
    return [model(torch.from_numpy(ids)[None].long()).logits[0].float().numpy() for ids in sequences]


def make_model(folder: Path) -> None:
    """Write the weights of a fixture, and golden.npz with `ids_N` and `logits_N`."""
    raw = json.loads((folder / "config.json").read_text())
    seed = zlib.crc32(folder.name.encode())
    for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
        old.unlink()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = model_class(raw).from_config(config_of(raw), dtype=torch.float32)
    weights = random_weights(model, generator)
    if "bfloat16" in (raw.get("torch_dtype"), raw.get("dtype")):
        weights = {k: v.to(torch.bfloat16).float() for k, v in weights.items()}
    model.load_state_dict(weights)
    if "bfloat16" in (raw.get("torch_dtype"), raw.get("dtype")):
        model = model.to(torch.bfloat16)
    save(model, folder, sharded=folder.name.endswith("_sharded"))
    rng = np.random.default_rng(seed)
    vocab_size = raw.get("vocab_size") or raw["text_config"]["vocab_size"]
    sequences = [rng.integers(3, vocab_size, n).astype(np.int32) for n in LENGTHS]
    logits = logits_of(read_back(folder), sequences)
    without = folder / "without.json"
    for key, value in (json.loads(without.read_text()) if without.is_file() else {}).items():
        plain = logits_of(read_back(folder, weights, {key: value}), sequences)
        change = max(float(np.abs(a - b).max()) for a, b in zip(logits, plain))
        assert change > 0.02, f"{folder.name}: with {key}={value} logits change by {change} only"
    arrays = {f"ids_{i}": s for i, s in enumerate(sequences)} | {f"logits_{i}": x for i, x in enumerate(logits)}
    np.savez_compressed(folder / "golden.npz", **arrays)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder.name:30} {size / 1e3:6.0f} kB   logits std {np.concatenate(logits).std():.2f}")


LONG = (
    "The lighthouse keeper had lived on the island for thirty-one years, and in that time he had learned to read "
    "the sea the way other men read newspapers. In the morning he climbed the hundred and twelve steps to the "
    "lamp room, wiped the salt from the glass, trimmed the wick out of habit although the lamp had been electric "
    "since 1962, and wrote the weather in a green notebook: wind, cloud, swell, birds. In the afternoon he mended"
    " nets that nobody used any more, and in the evening he listened to the radio, which brought him voices from "
    "four countries and music from a fifth. Once a month a boat came with flour, batteries, letters and gossip. "
    "The skipper, a woman called Ingrid whose father had brought the same supplies in the same boat, always asked"
    " the same question: would he not like to come back with her, just for a week, to see the new harbour and the"
    " shops and the children of his sister? And he always gave the same answer, that the light would miss him. "
    "But this October the boat brought a letter with the stamp of the ministry on it, and when he had read it "
    "twice he sat down on the stone bench by the door and looked for a long time at the horizon. The letter said "
    "that from the first of January the light would be run by a computer in the capital, that he had the thanks "
    "of the nation, and that a flat had been found for him on the third floor of a house with a lift. He folded "
    "it, put it in the green notebook, and"
)
PROMPTS: list[tuple[str, str]] = [
    ("text", "Once upon a time, in a village at the foot of the mountains, there lived a clockmaker who"),
    ("chat", "What is the capital of France? Answer in one sentence."),
    ("code", 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n'),
    ("french", "La photosynthèse est le processus par lequel les plantes"),
    ("german_chinese", "北京是中国的首都。Das heißt auf Deutsch: Peking ist die Hauptstadt"),
    ("russian_arabic", "Москва — столица России. القاهرة هي عاصمة"),
    ("list", "The first ten elements of the periodic table are:\n1. Hydrogen (H)\n2. Helium (He)\n3."),
    ("long", LONG),
]


@torch.no_grad()
def make_greedy(gguf: Path, steps: int = 64) -> None:
    """Write SmolLM2's greedy tokens in float32, with the gap between the two best logits of each step."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = packed.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(packed.state_dict())
    model.eval()
    cases = []
    for name, text in PROMPTS:
        if name == "chat":
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, cache, step_input = [], None, torch.tensor([prompt])
        gaps = []
        for _ in range(steps):
            out = model(step_input, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            best = out.logits[0, -1].topk(2)
            ids.append(int(best.indices[0]))
            gaps.append(round(float(best.values[0] - best.values[1]), 6))
            step_input = best.indices[:1][None]
        case = {"name": name, "prompt": text, "prompt_ids": prompt, "output_ids": ids, "gaps": gaps}
        cases.append({**case, "output": tokenizer.decode(ids, skip_special_tokens=False)})
        print(f"{name:15} {len(prompt):4} prompt ids, smallest gap {min(gaps):.5f}: {tokenizer.decode(ids)[:60]!r}")
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (FIXTURES / "smollm2_greedy.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct's GGUF file: create its greedy tokens")
    parser.add_argument("names", nargs="*", help="folders of tests/fixtures/golden")
    args = parser.parse_args()
    for name in args.names:
        make_model(FIXTURES / "golden" / name)
    if args.gguf:
        make_greedy(args.gguf)


if __name__ == "__main__":
    main()
