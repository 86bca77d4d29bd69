"""The rows of encoders among the architectures of GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxserve.model_source.gguf_row import MLP, NOTHING, OUTPUT, QKV, Architecture

_ENCODER_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
}
_NORM = ("attention.layer_norm_epsilon", "layer_norm_eps")

ENCODERS: Mapping[str, Architecture] = MappingProxyType(
    {
        # RoBERTa, XLM-RoBERTa and DistilBERT, too: without the rows of positions that they don't use
        "bert": Architecture(
            model=("BertModel", "bert"),
            constants={"hidden_act": "gelu"},
            implied=lambda config: {"rope_parameters": None},
            norm_epsilon=_NORM,
            biases=NOTHING,
            causal=False,
            tables={"token_types": "type_vocab_size", "position_embd": "max_position_embeddings"},
            ignored=("token_type_count",),
            names={
                "attn_q": "attention.self.query",
                "attn_k": "attention.self.key",
                "attn_v": "attention.self.value",
                "attn_output": "attention.output.dense",
                "attn_output_norm": "attention.output.LayerNorm",
                "ffn_up": "intermediate.dense",
                "ffn_down": "output.dense",
                "layer_output_norm": "output.LayerNorm",
            },
            top_names=_ENCODER_NAMES | {"token_embd_norm": "embeddings.LayerNorm"},
            layers="encoder.layer",
        ),
        "nomic-bert": Architecture(
            model=("NomicBertModel", "nomic_bert"),
            norm_epsilon=_NORM,
            biases=NOTHING,
            causal=False,
            tables={"token_types": "type_vocab_size"},
            ignored=("token_type_count",),
            names={
                "attn_qkv": "attn.Wqkv",
                "attn_output": "attn.out_proj",
                "attn_output_norm": "norm1",
                "ffn_gate": "mlp.fc12",
                "ffn_up": "mlp.fc11",
                "ffn_down": "mlp.fc2",
                "layer_output_norm": "norm2",
            },
            top_names=_ENCODER_NAMES | {"token_embd_norm": "emb_ln"},
            layers="encoder.layers",
        ),
        "modern-bert": Architecture(
            model=("ModernBertModel", "modernbert"),
            constants={"hidden_activation": "gelu"},
            implied=lambda config: {"local_attention": config["sliding_window"], "sliding_window": None},
            norm_epsilon=("attention.layer_norm_epsilon", "norm_eps"),
            biases=NOTHING,
            causal=False,
            window_period=3,
            full_first=True,
            local_theta=10000.0,
            names={
                "attn_norm": "attn_norm",
                "attn_qkv": "attn.Wqkv",
                "attn_output": "attn.Wo",
                "ffn_norm": "mlp_norm",
                "ffn_up": "mlp.Wi",
                "ffn_down": "mlp.Wo",
            },
            top_names={
                "token_embd": "model.embeddings.tok_embeddings",
                "token_embd_norm": "model.embeddings.norm",
                "output_norm": "model.final_norm",
            },
        ),
        "eurobert": Architecture(
            model=("EuroBertModel", "eurobert"), biases={"attention_bias": QKV + OUTPUT, "mlp_bias": MLP}, causal=False
        ),
    }
)
