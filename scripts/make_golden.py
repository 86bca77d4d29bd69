"""Creates the golden fixtures: tiny random checkpoints with Hugging Face's logits, and SmolLM2's greedy tokens.

Owns `tests/fixtures/golden/*` and `tests/fixtures/smollm2_greedy.json`. It doesn't use jaxserve, because jaxserve is
tested against them. It needs torch, so it runs in a separate environment (a small torch exists for 3.11 only):

    PYENV_VERSION=3.11.7 python3 -m venv .venv-ref
    .venv-ref/bin/pip install torch==2.13.0 "transformers>=5.19,<6" safetensors gguf accelerate
    .venv-ref/bin/python scripts/make_golden.py                        # the tiny models
    .venv-ref/bin/python scripts/make_golden.py --gguf SmolLM2.gguf    # and SmolLM2's greedy tokens

Hugging Face reads every folder back from its files, so the logits belong to exactly the config.json and weights there.
A fixture whose feature (scaling, window, norm, bias) leaves the logits unchanged is an error.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
LENGTHS = (5, 13, 48)

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA = {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
SMALL = {**LLAMA, "num_hidden_layers": 1, "vocab_size": 64, "tie_word_embeddings": True, "head_dim": 16}
QWEN2 = {**BASE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6}

# Each config has the fields of one style of checkpoint on the hub: transformers 4 has `rope_theta` and `rope_scaling`
# (whose kind was once called `type`) and often no `head_dim`; transformers 5 has `rope_parameters`.
MODELS: dict[str, dict[str, Any]] = {
    "llama2": {**LLAMA, "num_attention_heads": 2, "num_key_value_heads": 2, "torch_dtype": "float32"},
    "llama3": {
        **LLAMA,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_type": "llama3",
        },
        "eos_token_id": [2, 3],
    },
    "mistral": {
        **BASE,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 16,
        "rope_theta": 1000.0,
        "sliding_window": 16,
    },
    "smollm2": {
        **LLAMA,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    },
    "qwen2": {**QWEN2, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_theta": 1000000.0},
    "qwen3": {
        **BASE,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    },
    "llama_linear": {**SMALL, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_yarn": {
        **LLAMA,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    },
    "llama_yarn_attention_factor": {
        **SMALL,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.3,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "truncate": False,
        },
    },
    "qwen2_yarn": {
        **QWEN2,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "llama_bf16": {**SMALL, "num_hidden_layers": 2, "torch_dtype": "bfloat16"},
    "llama_head_dim": {**SMALL, "head_dim": 24, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
    "llama_sharded": {**SMALL, "tie_word_embeddings": False},
}
# Changes that must alter a fixture's logits: they remove its feature.
WITHOUT: dict[str, dict[str, Any]] = {
    "llama3": {"rope_scaling": None},
    "mistral": {"sliding_window": None},
    "llama_linear": {"rope_scaling": None},
    "llama_yarn": {"rope_scaling": {**MODELS["llama_yarn"]["rope_scaling"], "mscale": None}},
    "llama_yarn_attention_factor": {
        "rope_parameters": {**MODELS["llama_yarn_attention_factor"]["rope_parameters"], "truncate": True}
    },
    "qwen2_yarn": {"rope_scaling": None},
}


def random_weights(model: torch.nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return weights large enough that every part of the model affects the logits; norms near one, biases not zero."""
    weights = {}
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
        if "norm" in name:
            weights[name] = 1.0 + 0.3 * noise
        elif "embed_tokens" in name:
            weights[name] = noise if not model.config.tie_word_embeddings else 0.5 * noise
        else:
            weights[name] = 0.25 * noise
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def write_sharded(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write three files and an index; as in real checkpoints, a layer's tensors may be in different files."""
    names = sorted(weights)
    files = [f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)]
    weight_map = {name: files[i * 3 // len(names)] for i, name in enumerate(names)}
    for file in files:
        save_file({n: weights[n] for n in names if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def read_back(
    folder: Path, weights: dict[str, torch.Tensor], override: dict[str, Any] | None = None
) -> torch.nn.Module:
    """Load the folder with Hugging Face, in float32 with eager attention; `override` replaces config fields."""
    config = AutoConfig.from_pretrained(folder)
    if override is not None:
        raw = json.loads((folder / "config.json").read_text()) | override
        raw.pop("model_type")
        config = type(config)(**{k: v for k, v in raw.items() if v is not None or k == "sliding_window"})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        missing, extra = model.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
        assert not extra, extra
        assert missing in ([], ["lm_head.weight"]), missing
        model.tie_weights()
        return model.eval()
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@torch.no_grad()
def logits_of(model: torch.nn.Module, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Return the logits of every position, one sequence at a time."""
    return [model(torch.from_numpy(ids)[None].long()).logits[0].float().numpy() for ids in sequences]


def make_model(name: str, seed: int) -> None:
    """Write one fixture folder: config.json, weights, and golden.npz with `ids_N` and `logits_N`."""
    raw = MODELS[name]
    folder = FIXTURES / "golden" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    generator = torch.Generator().manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    weights = random_weights(AutoModelForCausalLM.from_config(config, dtype=torch.float32), generator)
    if raw.get("torch_dtype") == "bfloat16":
        weights = {k: v.to(torch.bfloat16) for k, v in weights.items()}
    if name == "llama_sharded":
        write_sharded(folder, weights)
    else:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(3, raw["vocab_size"], n).astype(np.int32) for n in LENGTHS]
    logits = logits_of(read_back(folder, weights), sequences)
    if name in WITHOUT:
        plain = logits_of(read_back(folder, weights, WITHOUT[name]), sequences)
        change = max(float(np.abs(a - b).max()) for a, b in zip(logits, plain))
        assert change > 0.02, f"{name}: without {list(WITHOUT[name])} logits change by {change} only"
    arrays = {f"ids_{i}": s for i, s in enumerate(sequences)} | {f"logits_{i}": x for i, x in enumerate(logits)}
    np.savez_compressed(folder / "golden.npz", **arrays)
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:30} {size / 1e3:6.0f} kB   logits std {np.concatenate(logits).std():.2f}")


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
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct's GGUF file: also create its greedy tokens")
    parser.add_argument("--skip-models", action="store_true", help="don't create the tiny models")
    args = parser.parse_args()
    if not args.skip_models:
        for seed, name in enumerate(MODELS):
            make_model(name, seed)
    if args.gguf:
        make_greedy(args.gguf)


if __name__ == "__main__":
    main()
