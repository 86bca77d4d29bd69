"""Tests the heads that draft against the published computation, written out in numpy with the published names."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.layers import embedding
from jaxserve.layers.axes import TENSOR_AXES
from jaxserve.layers.batch import LayerOutput
from jaxserve.models.draft_heads import mtp
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, family, parse_draft_head, parse_model_config
from jaxserve.runtime.devices.mesh import partitions
from jaxserve.weights import build_params
from jaxserve.weights.load import checkpoint_reader
from pallas_kernels.paged_attention import REFERENCE
from tests.models.forward import cpu_mesh, empty_pools, whole_prompt
from tests.tiny_model import CONFIG
from tests.weights.conftest import MemorySource, on_one_device

Tensors = dict[str, np.ndarray[Any, Any]]

DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 32, 4, 2, 16, 48, 258
EXPERTS, CHOSEN, WIDTH = 8, 3, 16
EPS, THETA = 1e-5, 10000.0
MIXTURE = CONFIG | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "num_nextn_predict_layers": 1,
}
LOW_RANK, RANK, PLAIN, TURNED, VALUE = 24, 32, 8, 16, 12
LATENT = MIXTURE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "head_dim": None,
    "num_key_value_heads": HEADS,
    "q_lora_rank": LOW_RANK,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": TURNED,
    "v_head_dim": VALUE,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
NEXT = CONFIG | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "head_dim": HEAD_DIM,
    "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": WIDTH,
}
DENSE = CONFIG | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": HEAD_DIM,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": THETA, "mrope_section": [1, 1, 0]},
}


def norm(x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], eps: float = EPS) -> np.ndarray[Any, Any]:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Rotate the first `width` dimensions of `[tokens, heads, dim]`, halves paired as Hugging Face has them."""
    angles = np.outer(np.arange(len(x)), THETA ** (-np.arange(0, width, 2) / width))[:, None]
    left, right, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], -1)


def attention(x: np.ndarray[Any, Any], own: Tensors, name: str, rotated: int = HEAD_DIM) -> np.ndarray[Any, Any]:
    q, k, v = (
        (x @ own[f"{name}.{letter}_proj.weight"].T).reshape(len(x), heads, HEAD_DIM)
        for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    q, k = rotate(q, rotated), rotate(k, rotated)
    k, v = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (k, v))
    return weighted_sums(q, k, v) @ own[f"{name}.o_proj.weight"].T


def gated_attention(x: np.ndarray[Any, Any], own: Tensors, name: str) -> np.ndarray[Any, Any]:
    """Attend as Qwen3-Next: heads are normalized, a quarter of each is rotated, and outputs have gates."""
    q, k, v = (
        (x @ own[f"{name}.{letter}_proj.weight"].T).reshape(len(x), heads, -1)
        for letter, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    q, gate = np.split(q, 2, axis=2)
    q, k = (
        rotate(norm(each, 1 + own[f"{name}.{letter}_norm.weight"]), HEAD_DIM // 4)
        for letter, each in (("q", q), ("k", k))
    )
    k, v = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (k, v))
    gates = 1 / (1 + np.exp(-gate.reshape(len(x), -1)))
    return (weighted_sums(q, k, v) * gates) @ own[f"{name}.o_proj.weight"].T


def latent_attention(x: np.ndarray[Any, Any], own: Tensors, name: str) -> np.ndarray[Any, Any]:
    """Attend as DeepSeek-V3, whose heads have rotated pairs side by side."""

    def turned(part: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return rotate(np.concatenate([part[..., ::2], part[..., 1::2]], -1), TURNED)

    low_rank = norm(x @ own[f"{name}.q_a_proj.weight"].T, own[f"{name}.q_a_layernorm.weight"], 1e-6)
    q = (low_rank @ own[f"{name}.q_b_proj.weight"].T).reshape(len(x), HEADS, -1)
    latent, key = np.split(x @ own[f"{name}.kv_a_proj_with_mqa.weight"].T, [RANK], axis=1)
    latent = norm(latent, own[f"{name}.kv_a_layernorm.weight"], 1e-6)
    plain, v = np.split((latent @ own[f"{name}.kv_b_proj.weight"].T).reshape(len(x), HEADS, -1), [PLAIN], axis=2)
    shared = np.repeat(turned(key[:, None]), HEADS, axis=1)
    q, k = np.concatenate([q[..., :PLAIN], turned(q[..., PLAIN:])], 2), np.concatenate([plain, shared], 2)
    return weighted_sums(q, k, v) @ own[f"{name}.o_proj.weight"].T


def weighted_sums(q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], v: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the outputs `[tokens, heads * dim]` of causal attention."""
    scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = np.where(np.tri(len(q), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def mlp(x: np.ndarray[Any, Any], own: Tensors, name: str) -> np.ndarray[Any, Any]:
    gate, up = (x @ own[f"{name}.{each}_proj.weight"].T for each in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ own[f"{name}.down_proj.weight"].T


def mixture(x: np.ndarray[Any, Any], own: Tensors, name: str) -> np.ndarray[Any, Any]:
    scores = 1 / (1 + np.exp(-x @ own[f"{name}.gate.weight"].T))
    chosen = np.argsort(-(scores + own[f"{name}.gate.e_score_correction_bias"]), axis=1)[:, :CHOSEN]
    out = mlp(x, own, f"{name}.shared_experts")
    for token, experts in enumerate(chosen):
        for expert in experts:
            share = scores[token, expert] / scores[token, experts].sum()
            out[token] += share * mlp(x[token : token + 1], own, f"{name}.experts.{expert}")[0]
    return out


def softmax_mixture(x: np.ndarray[Any, Any], own: Tensors, name: str) -> np.ndarray[Any, Any]:
    """Mix experts as Qwen3-Next: weights are a softmax over the chosen ones, and the shared expert has a gate."""
    logits = x @ own[f"{name}.gate.weight"].T
    out = mlp(x, own, f"{name}.shared_expert") / (1 + np.exp(-x @ own[f"{name}.shared_expert_gate.weight"].T))
    for token, experts in enumerate(np.argsort(-logits, axis=1)[:, :CHOSEN]):
        shares = np.exp(logits[token, experts] - logits[token].max())
        for expert, share in zip(experts, shares / shares.sum()):
            out[token] += share * mlp(x[token : token + 1], own, f"{name}.experts.{expert}")[0]
    return out


def eagle_logits(own: Tensors, embedded: Any, hidden: Any, head: Any) -> Any:
    x = np.concatenate([embedded, hidden], 1) @ own["fc.weight"].T + own.get("fc.bias", 0)
    x = x + attention(x, own, "layers.0.self_attn")
    x = x + mlp(norm(x, own["layers.0.post_attention_layernorm.weight"]), own, "layers.0.mlp")
    return x, x @ head.T


def eagle3_logits(
    own: Tensors, embedded: Any, features: Any, head: Any, *, layer: str, norm_before_residual: bool
) -> Any:
    normed = norm(features, own[f"{layer}.hidden_norm.weight"])
    residual = normed if norm_before_residual else features
    inputs = np.concatenate([norm(embedded, own[f"{layer}.input_layernorm.weight"]), normed], 1)
    x = residual + attention(inputs, own, f"{layer}.self_attn")
    x = x + mlp(norm(x, own[f"{layer}.post_attention_layernorm.weight"]), own, f"{layer}.mlp")
    found = norm(x, own["norm.weight"]) @ own.get("lm_head.weight", head).T
    if "d2t" not in own:
        return x, found
    logits = np.full((len(x), VOCAB), -np.inf)
    logits[:, np.arange(len(own["d2t"])) + own["d2t"]] = found
    return x, logits


def mtp_logits(own: Tensors, embedded: Any, hidden: Any, head: Any, *, latent: bool) -> Any:
    name = f"model.layers.{MIXTURE['num_hidden_layers']}"
    embedded = np.where(np.arange(len(embedded))[:, None] == 0, 0, embedded)
    parts = norm(embedded, own[f"{name}.enorm.weight"]), norm(hidden, own[f"{name}.hnorm.weight"])
    x = np.concatenate(parts, 1) @ own[f"{name}.eh_proj.weight"].T
    normed = norm(x, own[f"{name}.input_layernorm.weight"])
    attend = latent_attention if latent else functools.partial(attention, rotated=HEAD_DIM // 2)
    x = x + attend(normed, own, f"{name}.self_attn")
    x = x + mixture(norm(x, own[f"{name}.post_attention_layernorm.weight"]), own, f"{name}.mlp")
    x = norm(x, own[f"{name}.shared_head.norm.weight"])
    return x, x @ head.T


def qwen_mtp_logits(own: Tensors, embedded: Any, hidden: Any, head: Any, *, experts: bool) -> Any:
    def offset_norm(x: Any, name: str) -> Any:
        return norm(x, 1 + own[f"mtp.{name}.weight"])

    parts = offset_norm(embedded, "pre_fc_norm_embedding"), offset_norm(hidden, "pre_fc_norm_hidden")
    x = np.concatenate(parts, 1) @ own["mtp.fc.weight"].T
    x = x + gated_attention(offset_norm(x, "layers.0.input_layernorm"), own, "mtp.layers.0.self_attn")
    normed = offset_norm(x, "layers.0.post_attention_layernorm")
    x = x + (softmax_mixture if experts else mlp)(normed, own, "mtp.layers.0.mlp")
    x = offset_norm(x, "norm")
    return x, x @ head.T


def matrices(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Return random tensors: matrices that keep the size of what they multiply, and vectors near one."""
    return {
        name: (rng.standard_normal(shape) * shape[-1] ** -0.5 if len(shape) > 1 else 1 + rng.standard_normal(shape) / 8)
        for name, shape in shapes.items()
    }


def layer_shapes(name: str, inputs: int = DIM, dim: int = DIM) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, inputs),
        f"{name}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{name}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        f"{name}.self_attn.o_proj.weight": (dim, HEADS * HEAD_DIM),
        f"{name}.post_attention_layernorm.weight": (dim,),
    }


def latent_shapes(name: str) -> dict[str, tuple[int, ...]]:
    attention = f"{name}.self_attn"
    return {
        f"{attention}.q_a_proj.weight": (LOW_RANK, DIM),
        f"{attention}.q_a_layernorm.weight": (LOW_RANK,),
        f"{attention}.q_b_proj.weight": (HEADS * (PLAIN + TURNED), LOW_RANK),
        f"{attention}.kv_a_proj_with_mqa.weight": (RANK + TURNED, DIM),
        f"{attention}.kv_a_layernorm.weight": (RANK,),
        f"{attention}.kv_b_proj.weight": (HEADS * (PLAIN + VALUE), RANK),
        f"{attention}.o_proj.weight": (DIM, HEADS * VALUE),
        f"{name}.post_attention_layernorm.weight": (DIM,),
    }


def mlp_shapes(name: str, width: int = FFN, dim: int = DIM) -> dict[str, tuple[int, ...]]:
    up = (width, dim)
    return {f"{name}.gate_proj.weight": up, f"{name}.up_proj.weight": up, f"{name}.down_proj.weight": (dim, width)}


def eagle3_shapes(layer: str, dim: int = DIM, draft_vocab: int | None = None) -> dict[str, tuple[int, ...]]:
    norms = dict.fromkeys((f"{layer}.input_layernorm.weight", f"{layer}.hidden_norm.weight", "norm.weight"), (dim,))
    shapes = layer_shapes(f"{layer}", 2 * dim, dim) | mlp_shapes(f"{layer}.mlp", dim=dim) | norms
    head = {} if draft_vocab is None else {"lm_head.weight": (draft_vocab, dim)}
    return shapes | {"fc.weight": (dim, 3 * DIM)} | head


def drafted(
    config: Any, tensors: Tensors, tokens: np.ndarray[Any, Any], table: Any, hidden: Any, taps: Any, head: Any
) -> tuple[Any, Any]:
    """Return what the head returns for a whole sequence: the features that it feeds back, and its logits."""
    laid_out = LaidOutModel(config)
    abstract = abstract_params(laid_out, np.dtype(np.float32))
    stored = {name: x if x.dtype == np.int64 else x.astype(np.float32) for name, x in tensors.items()}
    params = build_params(abstract, on_one_device(abstract), checkpoint_reader(abstract, MemorySource(stored)))
    kv = empty_pools(laid_out, len(tokens))
    batch = whole_prompt(jnp.array(tokens, jnp.int32), jnp.int32(len(tokens)))

    def run(params: Any, table: Any, hidden: Any, taps: Any, head: Any) -> tuple[Any, Any]:
        module = family(laid_out)
        features = module.features(laid_out, params, LayerOutput(hidden, kv, features=taps))
        embedded = embedding.embed(batch.tokens, table)
        found = module.forward(laid_out, params, embedded, features, batch, kv, REFERENCE).hidden
        return found, module.logits(laid_out, params, found, lambda x, _: embedding.logits(x, head))

    whole, split = PartitionSpec(), PartitionSpec(None, TENSOR_AXES)
    mapped = jax.shard_map(
        run,
        mesh=cpu_mesh(),
        in_specs=(partitions(abstract), PartitionSpec(TENSOR_AXES), whole, whole, PartitionSpec(TENSOR_AXES)),
        out_specs=(whole, split),
        check_vma=False,
    )
    inputs = jax.tree.map(lambda x: jnp.array(x, jnp.float32), (table, hidden, taps, head))
    found, logits = jax.jit(mapped)(params, *inputs)
    return np.array(found), np.array(logits)


@pytest.fixture
def model() -> dict[str, Any]:
    """Return what a model gives a head: hidden states, the inputs of three layers, embedding and head."""
    rng = np.random.default_rng(3)
    return {
        "tokens": rng.integers(0, VOCAB, 21),
        "table": rng.standard_normal((VOCAB, DIM)),
        "hidden": rng.standard_normal((21, DIM)),
        "taps": tuple(rng.standard_normal((3, 21, DIM))),
        "head": rng.standard_normal((VOCAB, DIM)) * DIM**-0.5,
    }


def assert_close(found: Any, expected: Any) -> None:
    for own, other in zip(found, expected):
        np.testing.assert_allclose(own, other, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("biased", [False, True])
def test_eagle(model: dict[str, Any], *, biased: bool) -> None:
    shapes = layer_shapes("layers.0") | mlp_shapes("layers.0.mlp") | {"fc.weight": (DIM, 2 * DIM)}
    own = matrices(np.random.default_rng(1), shapes | ({"fc.bias": (DIM,)} if biased else {}))
    copies = {"embed_tokens.weight": np.zeros((VOCAB, DIM))}
    raw = CONFIG | {"num_hidden_layers": 1}
    config = parse_draft_head(raw, "head", "eagle", own)
    expected = eagle_logits(own, model["table"][model["tokens"]], model["hidden"], model["head"])
    assert_close(drafted(config, own | copies, **model), expected)


@pytest.mark.parametrize(
    ("architecture", "layer", "norm_before_residual"),
    [("LlamaForCausalLM", "midlayer", False), ("Eagle3Speculator", "layers.0", True)],
)
def test_eagle3(model: dict[str, Any], architecture: str, layer: str, *, norm_before_residual: bool) -> None:
    rng = np.random.default_rng(2)
    own = matrices(rng, eagle3_shapes(layer, draft_vocab=200))
    ids = np.sort(rng.choice(VOCAB, 200, replace=False))
    own["d2t"] = ids - np.arange(200)
    raw = CONFIG | {
        "architectures": [architecture],
        "num_hidden_layers": 1,
        "draft_vocab_size": 200,
        "norm_before_residual": norm_before_residual,
    }
    config = parse_draft_head(raw, "head", "eagle3", own)
    expected = eagle3_logits(
        own,
        model["table"][model["tokens"]],
        np.concatenate(model["taps"], 1) @ own["fc.weight"].T,
        model["head"],
        layer=layer,
        norm_before_residual=norm_before_residual,
    )
    assert_close(drafted(config, own | {"t2d": np.zeros(VOCAB)}, **model), expected)


@pytest.mark.parametrize(
    ("dim", "fields", "shares_head"),
    [
        pytest.param(DIM, {"draft_vocab_size": None}, True, id="the head of the model"),
        pytest.param(DIM, {"embed_requires_grad": True}, False, id="an embedding of its own"),
        pytest.param(64, {"hidden_size": 64, "target_hidden_size": DIM}, False, id="another width"),
    ],
)
def test_what_eagle3_shares(model: dict[str, Any], dim: int, fields: dict[str, Any], *, shares_head: bool) -> None:
    shapes = eagle3_shapes("midlayer", dim, None if shares_head else VOCAB) | {"embed_tokens.weight": (VOCAB, dim)}
    own = matrices(np.random.default_rng(5), shapes)
    raw = CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1} | fields
    config = parse_draft_head(raw, "head", "eagle3", own)
    table = model["table"] if shares_head else own["embed_tokens.weight"]
    expected = eagle3_logits(
        own,
        table[model["tokens"]],
        np.concatenate(model["taps"], 1) @ own["fc.weight"].T,
        model["head"],
        layer="midlayer",
        norm_before_residual=False,
    )
    assert_close(drafted(config, own, **model), expected)
    assert parse_draft_head(raw, "head", "eagle3", ()) == config  # as before it is downloaded


def test_a_reduced_vocabulary_needs_the_ids_of_its_tokens(model: dict[str, Any]) -> None:
    own = matrices(np.random.default_rng(6), eagle3_shapes("midlayer", draft_vocab=200))
    config = parse_draft_head(CONFIG | {"num_hidden_layers": 1, "draft_vocab_size": 200}, "head", "eagle3", own)
    with pytest.raises(ConfigError, match="missing: d2t"):
        drafted(config, own, **model)


@pytest.mark.parametrize("latent", [False, True])
def test_multi_token_prediction(model: dict[str, Any], *, latent: bool) -> None:
    rng, name = np.random.default_rng(4), f"model.layers.{MIXTURE['num_hidden_layers']}"
    experts = [f"{name}.mlp.experts.{expert}" for expert in range(EXPERTS)]
    layer = latent_shapes(name) if latent else layer_shapes(name)
    shapes = layer | {f"{name}.mlp.gate.weight": (EXPERTS, DIM), f"{name}.eh_proj.weight": (DIM, 2 * DIM)}
    for block in (*experts, f"{name}.mlp.shared_experts"):
        shapes |= mlp_shapes(block, WIDTH)
    for each in ("input_layernorm", "enorm", "hnorm", "shared_head.norm"):
        shapes[f"{name}.{each}.weight"] = (DIM,)
    own = matrices(rng, shapes)
    own[f"{name}.mlp.gate.e_score_correction_bias"] = rng.standard_normal(EXPERTS) / 8
    copies = {f"{name}.{each}.weight": np.zeros((VOCAB, DIM)) for each in ("embed_tokens", "shared_head.head")}
    config = mtp.config_of(parse_model_config(LATENT if latent else MIXTURE))
    expected = mtp_logits(own, model["table"][model["tokens"]], model["hidden"], model["head"], latent=latent)
    assert_close(drafted(config, own | copies, **model), expected)


@pytest.mark.parametrize("experts", [False, True])
def test_multi_token_prediction_of_qwen(model: dict[str, Any], *, experts: bool) -> None:
    attention, block = "mtp.layers.0.self_attn", "mtp.layers.0.mlp"
    shapes = layer_shapes("mtp.layers.0") | {f"{attention}.q_proj.weight": (2 * HEADS * HEAD_DIM, DIM)}
    shapes |= dict.fromkeys((f"{attention}.q_norm.weight", f"{attention}.k_norm.weight"), (HEAD_DIM,))
    for each in ("layers.0.input_layernorm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"mtp.{each}.weight"] = (DIM,)
    shapes["mtp.fc.weight"] = (DIM, 2 * DIM)
    if experts:
        shapes |= {f"{block}.gate.weight": (EXPERTS, DIM), f"{block}.shared_expert_gate.weight": (1, DIM)}
        for one in (*(f"{block}.experts.{expert}" for expert in range(EXPERTS)), f"{block}.shared_expert"):
            shapes |= mlp_shapes(one, WIDTH)
    else:
        shapes |= mlp_shapes(block)
    own = matrices(np.random.default_rng(8), shapes)
    parsed = parse_model_config(NEXT if experts else DENSE)
    expected = qwen_mtp_logits(own, model["table"][model["tokens"]], model["hidden"], model["head"], experts=experts)
    assert_close(drafted(mtp.config_of(parsed), own, **model), expected)
    assert mtp.prefix_of(parsed) == "mtp."
