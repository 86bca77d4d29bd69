"""Creates the fixtures of encoders: tiny random checkpoints, and the vectors of other libraries.

Owns the folders of `tests/fixtures/pooled` that `MAKERS` names; make_pooled.py says what is in one, and how to install
what it needs. The tokenizers are of the kinds that these families have. Cases may be pairs of texts:

    .venv-ref/bin/python scripts/make_encoders.py                    # or the names of some folders
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from make_pooled import (
    SIZES,
    TEXTS,
    make,
    numbers,
    of_sentences,
    random_state,
    write_json,
    write_modules,
    write_tokenizer,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAIRS = (
    ("What is a lighthouse?", "A tower with a lamp."),
    ("yes", "The skipper, a woman called Ingrid, always asked the same question: yes or no?"),
)
ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_act": "gelu",
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}

Renames = Callable[[str], str]


def write_wordpiece(folder: Path) -> int:
    """Write BERT's kind of tokenizer; return the number of its tokens."""
    words = ["what", "is", "the", "light", "##house", "question", "yes", "no", "?", ",", ":", "."]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *LETTERS, *(f"##{each}" for each in LETTERS)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    single, pair = "[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1"
    backend.post_processor = processors.TemplateProcessing(single, pair, [("[CLS]", 2), ("[SEP]", 3)])
    save_tokenizer(
        folder, backend, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )
    return len(vocab)


def write_unigram(folder: Path) -> int:
    """Write XLM-RoBERTa's kind of tokenizer; return the number of its tokens."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁the", "▁what", "house", "tower", "?", ",", ".", ":"]
    pieces += [*LETTERS, *LETTERS.upper(), "<mask>"]
    backend = Tokenizer(models.Unigram([(piece, -1.0 - i / 8) for i, piece in enumerate(pieces)], unk_id=3))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.decoder = decoders.Metaspace()
    special = [("<s>", 0), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", special)
    save_tokenizer(
        folder,
        backend,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )
    return len(pieces)


def write_bytes(folder: Path, bos: str, eos: str) -> int:
    """Write a tokenizer of bytes, with a token before and one after each text; return the number of its tokens."""
    write_tokenizer(folder, bos=bos, end=eos)
    return SIZES["vocab_size"]


def save_tokenizer(folder: Path, backend: Tokenizer, **special: str) -> None:
    PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=256, **special).save_pretrained(folder)


def write_encoder(
    folder: Path, auto: Any, config: dict[str, Any], architecture: str, rename: Renames = str, fuse: Any = None
) -> Any:
    """Write config.json and random weights, under the names that `rename` returns; return the model read back.

    `fuse` joins some tensors.
    """
    write_json(folder / "config.json", {"architectures": [architecture], **config})
    loaded = auto.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    state = random_state(loaded, folder.name)
    state = state if fuse is None else fuse(state)
    named = {rename(name): value.contiguous() for name, value in state.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    again = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for (name, value), found in zip(random_state(loaded, folder.name).items(), again.state_dict().values()):
        assert "position_ids" in name or torch.equal(value, found), f"{folder.name}: {name} isn't read back"
    return again


@torch.no_grad()
def write_labels(folder: Path, model: Any, *, pairs: bool) -> None:
    """Write the logits of each text, or of each pair."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = []
    for text in [*(PAIRS if pairs else ()), *TEXTS]:
        first, second = text if isinstance(text, tuple) else (text, None)
        found = tokenizer(first, second, return_tensors="pt", return_token_type_ids=True)
        if getattr(model.config, "type_vocab_size", 0) < 2:
            found.pop("token_type_ids")
        ids = found["input_ids"][0].tolist()
        case: dict[str, Any] = {"text": first, "ids": ids, "vector": numbers(model(**found).logits[0])}
        types = found["token_type_ids"][0].tolist() if "token_type_ids" in found else [0]
        more = {} if second is None else {"second": second}
        cases.append({**case, **more, **({"second_start": types.index(1)} if 1 in types else {})})
    write_json(folder / "expected.json", {"cases": cases})


def pooled(folder: Path, mode: str, *kinds: str, texts: Sequence[str] = TEXTS) -> None:
    """Write the modules that pool, and what sentence-transformers computes."""
    write_modules(folder, "sentence_transformers.models", "Pooling", *kinds)
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 16, f"pooling_mode_{mode}": True})
    of_sentences(folder, texts=texts)


def labels(*names: str) -> dict[str, Any]:
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


def bert_mean(folder: Path) -> None:
    """A BERT as first published: a prefix, the old names of norms, heads for training; the mean, normalized."""
    size = write_wordpiece(folder)
    config = {**ENCODER, "model_type": "bert", "vocab_size": size, "pad_token_id": 0, "type_vocab_size": 2}

    def old(name: str) -> str:
        norms = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, first in norms.items():
            name = name.replace(new, first)
        return name

    write_encoder(folder, AutoModelForMaskedLM, config, "BertForMaskedLM", old)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 100, "do_lower_case": False})
    pooled(folder, "mean_tokens", "Normalize")


def bert_labels(folder: Path) -> None:
    """A BERT that labels pairs: its pooler, then a classifier."""
    size = write_wordpiece(folder)
    names = labels("contradiction", "entailment", "neutral")
    config = {**ENCODER, **names, "model_type": "bert", "vocab_size": size, "pad_token_id": 0, "type_vocab_size": 2}
    auto = AutoModelForSequenceClassification
    write_labels(folder, write_encoder(folder, auto, config, "BertForSequenceClassification"), pairs=True)


def distilbert_labels(folder: Path) -> None:
    """A DistilBERT with a classifier."""
    size = write_wordpiece(folder)
    sizes = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "activation": "gelu"}
    limits = {"max_position_embeddings": 256, "vocab_size": size, "pad_token_id": 0, "tie_word_embeddings": True}
    config = {**sizes, **limits, **labels("NEGATIVE", "POSITIVE"), "model_type": "distilbert"}
    auto = AutoModelForSequenceClassification
    write_labels(folder, write_encoder(folder, auto, config, "DistilBertForSequenceClassification"), pairs=False)


def roberta_labels(folder: Path) -> None:
    """A RoBERTa with several labels for a text."""
    size = write_bytes(folder, "<|im_start|>", "<|im_end|>")
    names = {**labels("joy", "anger", "fear"), "problem_type": "multi_label_classification"}
    ids = {"pad_token_id": SIZES["pad_token_id"], "type_vocab_size": 1, "vocab_size": size}
    rows = {"max_position_embeddings": SIZES["pad_token_id"] + 1 + 256}
    config = {**ENCODER, **names, **ids, **rows, "model_type": "roberta", "layer_norm_eps": 1e-5}
    auto = AutoModelForSequenceClassification
    write_labels(folder, write_encoder(folder, auto, config, "RobertaForSequenceClassification"), pairs=False)


def xlmr_pair(folder: Path) -> None:
    """A reranker: XLM-RoBERTa with one label for a pair."""
    size = write_unigram(folder)
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1, "vocab_size": size}
    rows = {"max_position_embeddings": 258, "layer_norm_eps": 1e-5}
    config = {**ENCODER, **ids, **rows, **labels("LABEL_0"), "model_type": "xlm-roberta"}
    auto = AutoModelForSequenceClassification
    write_labels(folder, write_encoder(folder, auto, config, "XLMRobertaForSequenceClassification"), pairs=True)


def mpnet(folder: Path) -> None:
    """An MPNet without a prefix; the mean, normalized."""
    size = write_unigram(folder)
    rows = {"max_position_embeddings": 258, "layer_norm_eps": 1e-5, "relative_attention_num_buckets": 32}
    config = {**ENCODER, **rows, "vocab_size": size, "pad_token_id": 1, "model_type": "mpnet"}
    write_encoder(folder, AutoModel, config, "MPNetForMaskedLM")
    pooled(folder, "mean_tokens", "Normalize", texts=[*TEXTS, " ".join(TEXTS * 2)])


MODERNBERT = {
    **{name: value for name, value in ENCODER.items() if name != "hidden_act"},
    "num_hidden_layers": 4,
    "model_type": "modernbert",
    "hidden_activation": "gelu",
    "local_attention": 12,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    **{f"{name}_token_id": SIZES["eos_token_id" if name == "sep" else "bos_token_id"] for name in ("cls", "sep")},
    **{name: SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    "position_embedding_type": "absolute",
}


def modernbert(folder: Path) -> None:
    """A ModernBERT without a prefix; its first token."""
    size = write_bytes(folder, "<|im_start|>", "<|im_end|>")
    write_encoder(folder, AutoModel, {**MODERNBERT, "vocab_size": size}, "ModernBertModel")
    pooled(folder, "cls_token", "Normalize")


def modernbert_labels(folder: Path) -> None:
    """A ModernBERT with biases and labels of the mean."""
    size = write_bytes(folder, "<|im_start|>", "<|im_end|>")
    biases = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
    config = {**MODERNBERT, **biases, **labels("a", "b"), "classifier_pooling": "mean", "vocab_size": size}
    auto = AutoModelForSequenceClassification
    write_labels(folder, write_encoder(folder, auto, config, "ModernBertForSequenceClassification"), pairs=False)


def fused(*names: str, to: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Return the function that joins the rows of tensors whose names have these endings, in this order."""

    def fuse(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = dict(state)
        for name in state:
            stem, first, kind = name.rpartition(names[0])
            if first:
                parts = [found.pop(f"{stem}{each}{kind}") for each in names]
                found[f"{stem}{to}{kind}"] = torch.cat(parts)
        return found

    return fuse


def renamed(*changes: tuple[str, str]) -> Renames:
    def rename(name: str) -> str:
        for old, new in changes:
            name = name.replace(old, new)
        return name

    return rename


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def nomic(folder: Path) -> None:
    """A NomicBERT with the names of Nomic AI; the mean, normalized, with prompts."""
    size = write_wordpiece(folder)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}, "hidden_act": "silu"}
    ids = {"vocab_size": size, "pad_token_id": 0, "type_vocab_size": 2, "model_type": "nomic_bert"}
    names = [("layers.", "encoder.layers."), ("embeddings.LayerNorm", "emb_ln"), ("self_attn.o_proj", "attn.out_proj")]
    names += [("up_proj", "fc11"), ("gate_proj", "fc12"), ("down_proj", "fc2")]
    names += [("post_attention_layernorm", "norm1"), ("post_mlp_layernorm", "norm2")]
    fuse = fused(*_QKV, to="attn.Wqkv")
    write_encoder(folder, AutoModel, {**ENCODER, **rope, **ids}, "NomicBertModel", renamed(*names), fuse)
    prompts = {"query": "search_query: ", "document": "search_document: "}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    pooled(folder, "mean_tokens", "Normalize")


def gte(folder: Path) -> None:
    """A GTE with Alibaba's names; its first token."""
    size = write_unigram(folder)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    ids = {"vocab_size": size, "pad_token_id": 1, "type_vocab_size": 1, "model_type": "gte"}
    names = [("layers.", "encoder.layer."), ("self_attn.o_proj", "attention.o_proj")]
    names += [("post_attention_layernorm", "attn_ln"), ("post_mlp_layernorm", "mlp_ln")]
    heads, blocks = fused(*_QKV, to="attention.qkv_proj"), fused("mlp.up_proj", "mlp.gate_proj", to="mlp.up_gate_proj")

    def rename(name: str) -> str:
        return f"new.{renamed(*names)(name)}"

    config = {**ENCODER, **rope, **ids}
    write_encoder(folder, AutoModel, config, "GteModel", rename, lambda state: heads(blocks(state)))
    pooled(folder, "cls_token", "Normalize")


def gemma_bidirectional(folder: Path) -> None:
    """An EmbeddingGemma: windows on both sides, the mean, two dense layers, normalized."""
    write_tokenizer(folder, bos="<|im_start|>", end="<|im_end|>")
    layers = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    gemma = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 8}
    both = {"use_bidirectional_attention": True, "sliding_window": 13, "tie_word_embeddings": True}
    write_encoder(folder, AutoModel, {**SIZES, **layers, **gemma, **both}, "Gemma3TextModel")
    for path, size in {"2_Dense": (16, 20), "3_Dense": (20, 12)}.items():
        identity = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}
        write_json(folder / path / "config.json", {"in_features": size[0], "out_features": size[1], **identity})
        linear = torch.nn.Sequential()
        linear.add_module("linear", torch.nn.Linear(*size, bias=False))
        save_file(random_state(linear, f"{folder.name}/{path}"), folder / path / "model.safetensors")
    pooled(folder, "mean_tokens", "Dense", "Dense", "Normalize")


def qwen3_bidirectional(folder: Path) -> None:
    """A Qwen3 with `is_causal: false`; the mean."""
    write_tokenizer(folder)
    config = {**SIZES, "model_type": "qwen3", "hidden_act": "silu", "tie_word_embeddings": True, "is_causal": False}
    write_encoder(folder, AutoModel, config, "Qwen3Model")
    pooled(folder, "mean_tokens", "Normalize")


MAKERS = [
    bert_mean,
    bert_labels,
    distilbert_labels,
    roberta_labels,
    xlmr_pair,
    mpnet,
    modernbert,
    modernbert_labels,
    nomic,
    gte,
    gemma_bidirectional,
    qwen3_bidirectional,
]

if __name__ == "__main__":
    make(MAKERS, __doc__)
