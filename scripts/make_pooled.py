"""Creates the fixtures of pooled requests: tiny random checkpoints, and the vectors of other libraries.

Owns `tests/fixtures/pooled/*`. Each folder is a checkpoint as one on the hub, with a tokenizer of bytes, and
`expected.json`: texts, their ids, and the vector or the logits of each, before normalization and activation;
`embedding` is what sentence-transformers returns. It doesn't use jaxserve, because jaxserve is tested against them:

    python3 -m venv .venv-ref
    .venv-ref/bin/pip install torch==2.13.0 "transformers>=5.23,<6" "sentence-transformers>=6,<7"
    .venv-ref/bin/python scripts/make_pooled.py                    # or the names of some folders
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.cross_encoder.modules import LogitScore
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

FIXTURES = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "pooled"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
MERGES = (("y", "e"), ("ye", "s"), ("n", "o"))
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
END = len(BYTES) + len(MERGES)
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": END + len(SPECIAL),
    "max_position_embeddings": 512,
    "bos_token_id": END,
    "eos_token_id": END + 2,
    "pad_token_id": END,
    "rms_norm_eps": 1e-6,
}
QWEN3 = {**SIZES, "model_type": "qwen3", "hidden_act": "silu", "tie_word_embeddings": True}
LLAMA = {**SIZES, "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False}
GEMMA2 = {
    **SIZES,
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 16,
    "query_pre_attn_scalar": 8,
}
QWEN2 = {**SIZES, "model_type": "qwen2", "hidden_act": "silu", "tie_word_embeddings": False}
TEXTS = (
    "a",
    "What is a lighthouse?",
    "The skipper, a woman called Ingrid, always asked the same question: yes or no?",
)

Vectors = Callable[[list[int]], torch.Tensor]


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_tokenizer(folder: Path, end: str = "", bos: str = "") -> None:
    """Write a tokenizer of bytes with the tokens `yes` and `no`; special tokens begin and `end` each text."""
    merged = [a + b for a, b in MERGES]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*BYTES, *merged])}, list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    if end:
        ids = [(each, backend.token_to_id(each)) for each in (bos, end) if each]
        first = f"{bos} $A" if bos else "$A"
        pair = f"{first} {end} $B {end}" if bos else f"{first} $B {end}"
        backend.post_processor = processors.TemplateProcessing(f"{first} {end}", pair, ids)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.save_pretrained(folder)


def random_state(model: torch.nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Return weights large enough that every part of the model matters."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    found = {}
    for key, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        is_norm = "norm" in key and key.endswith("weight")
        found[key] = value.float() + 0.3 * noise if is_norm else (0.5 if "embed_tokens" in key else 0.3) * noise
    if "lm_head.weight" in found and model.config.tie_word_embeddings:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def write_model(folder: Path, auto: Any, config: dict[str, Any], architecture: str, **changes: Any) -> Any:
    """Write config.json and random weights under the names that `auto`'s class has; return the model read back."""
    raw = {"architectures": [architecture], **config, **changes}
    write_json(folder / "config.json", raw)
    loaded = auto.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    state = random_state(loaded, folder.name)
    if raw["tie_word_embeddings"]:
        state.pop("lm_head.weight", None)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def write_expected(
    folder: Path,
    vectors: Vectors,
    embed: Callable[[str], Any] | None = None,
    texts: Sequence[str] = TEXTS,
    **more: Any,
) -> None:
    """Write the vector of each text; `embed` returns that of sentence-transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        case = {"text": text, "ids": ids, "vector": numbers(vectors(ids))}
        cases.append(case if embed is None else {**case, "embedding": numbers(embed(text))})
    write_json(folder / "expected.json", {"cases": cases, **more})


def numbers(vector: Any) -> list[float]:
    return [float(f"{x:.8g}") for x in torch.as_tensor(vector).flatten().tolist()]


def of_sentences(folder: Path, **more: Any) -> None:
    """Write what sentence-transformers computes, up to the normalization."""
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    modules = [module for module in model if type(module).__name__ != "Normalize"]

    def vectors(ids: list[int]) -> torch.Tensor:
        features: Any = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        for module in modules:
            features = module(features)
        return features["sentence_embedding"][0]

    prompted = {name: numbers(model.encode(TEXTS[1], prompt_name=name)) for name in model.prompts}
    write_expected(folder, vectors, lambda text: model.encode(text, prompt=""), prompted=prompted, **more)


def qwen3_embedding(folder: Path) -> None:
    """Qwen3-Embedding as published: names without `model.`, the last token, which the tokenizer appends."""
    write_tokenizer(folder, end="<|endoftext|>")
    write_model(folder, AutoModel, QWEN3, "Qwen3ForCausalLM")
    write_modules(folder, "sentence_transformers.models", "Pooling", "Normalize")
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    old = {f"pooling_mode_{mode}": mode == "lasttoken" for mode in modes}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 16, **old, "include_prompt": True})
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    of_sentences(folder)


def llama_mean_dense(folder: Path) -> None:
    """A fine-tuned Llama: the mean of all tokens, a dense layer with tanh, normalization, a default prompt."""
    write_tokenizer(folder)
    write_model(folder, AutoModel, LLAMA, "LlamaModel", matryoshka_dimensions=[10, 4])
    write_modules(folder, "sentence_transformers.sentence_transformer.modules", "Pooling", "Dense", "Normalize")
    pooling = {"embedding_dimension": 16, "pooling_mode": "mean", "include_prompt": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    dense = {"in_features": 16, "out_features": 10, "bias": True}
    dense |= {"activation_function": "torch.nn.modules.activation.Tanh"}
    write_json(folder / "2_Dense" / "config.json", dense)
    linear = torch.nn.Sequential()
    linear.add_module("linear", torch.nn.Linear(16, 10))
    save_file(random_state(linear, folder.name), folder / "2_Dense" / "model.safetensors")
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 96, "do_lower_case": False})
    prompts = {"passage": "passage: ", "query": "query: "}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "passage"})
    of_sentences(folder)


def write_modules(folder: Path, package: str, *kinds: str) -> None:
    """Write modules.json with a Transformer and these modules, each in a folder of its own."""
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{package}.Transformer"}]
    for i, kind in enumerate(kinds, 1):
        entries.append({"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"{package}.{kind}"})
    write_json(folder / "modules.json", entries)


def qwen3_reranker(folder: Path) -> None:
    """Qwen3-Reranker as published: a causal model; its scores are made of the logits of `no` and `yes`."""
    write_tokenizer(folder)
    model = write_model(folder, AutoModelForCausalLM, QWEN3, "Qwen3ForCausalLM")
    tokens = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["no", "yes"])
    score = LogitScore(true_token_id=tokens[1], false_token_id=tokens[0])
    with torch.no_grad():
        ids = AutoTokenizer.from_pretrained(folder)(TEXTS[0])["input_ids"]
        scored = score({"causal_logits": model(torch.tensor([ids])).logits})["scores"]
    write_expected(
        folder,
        lambda ids: model(torch.tensor([ids])).logits[0, -1, tokens],
        tokens=tokens,
        score=float(scored.sigmoid()),
    )


def qwen3_score(folder: Path) -> None:
    """A reranker with a head of one label."""
    write_tokenizer(folder)
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    auto = AutoModelForSequenceClassification
    model = write_model(folder, auto, QWEN3, "Qwen3ForSequenceClassification", **labels)
    write_expected(folder, lambda ids: model(torch.tensor([ids])).logits[0])


def gemma2_labels(folder: Path) -> None:
    """A classifier of three labels."""
    write_tokenizer(folder)
    names = ["negative", "neutral", "positive"]
    labels = {"id2label": {str(i): name for i, name in enumerate(names)}}
    auto = AutoModelForSequenceClassification
    model = write_model(folder, auto, GEMMA2, "Gemma2ForSequenceClassification", **labels)
    write_expected(folder, lambda ids: model(torch.tensor([ids])).logits[0])


def qwen2_reward(folder: Path) -> None:
    """A reward model of Qwen2: its head has two layers."""
    write_tokenizer(folder)
    body = write_model(folder, AutoModel, QWEN2, "Qwen2ForRewardModel", num_labels=1)
    head = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    state = random_state(head, "score")
    head.load_state_dict(state)
    named = {f"model.{name}": value for name, value in body.state_dict().items()}
    named |= {f"score.{name}": value for name, value in state.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    write_expected(folder, lambda ids: head(body(torch.tensor([ids])).last_hidden_state[0, -1]))


MAKERS = [qwen3_embedding, llama_mean_dense, qwen3_reranker, qwen3_score, gemma2_labels, qwen2_reward]


def make(makers: list[Callable[[Path], None]], description: str | None) -> None:
    """Make the folders that the command line names, by default all."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0] if description else None)
    parser.add_argument("names", nargs="*", help="folders of tests/fixtures/pooled; default: all")
    wanted = parser.parse_args().names
    for maker in makers:
        if not wanted or maker.__name__ in wanted:
            folder = FIXTURES / maker.__name__
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            maker(folder)
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            print(f"{folder.name:20} {size / 1e3:6.0f} kB")


if __name__ == "__main__":
    make(MAKERS, __doc__)
