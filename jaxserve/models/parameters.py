"""Declares the parameters that most families have, each with its shape, axes and the names of its tensors.

A family builds its tree from these; the names are those of Hugging Face's checkpoints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxserve.layers.attention import AttentionParams
from jaxserve.layers.mixture import ExpertParams, RouterParams
from jaxserve.layers.mlp import MlpParams
from jaxserve.layers.rope import RopeConfig, head_order
from jaxserve.model_source.pooling import PooledLayer
from jaxserve.models.layout import AnyModel
from jaxserve.params import EXPERT_AXES, Initializer, Order, ParamSpec, TensorPart, View

_WIDE = np.dtype(jnp.float32)
_ROWS_OF_KERNELS = 16


@flax.struct.dataclass
class PooledParams:
    """The weights of a layer after pooling, and of the layer norm after it, if there is one. Rows of zeros follow its
    outputs, and zeros its bias."""

    weight: Array
    bias: Array | None
    norm: Any = None


@flax.struct.dataclass
class Params:
    """All weights of a model: `layers` are of the family's own type, `pooled` those of the layers after pooling.

    `output` is None if the head is the embedding, or if the model only pools: then it has no head.
    """

    embedding: Array
    layers: tuple[Any, ...]
    norm: Any
    output: Array | None
    pooled: tuple[PooledParams, ...] = ()
    has_head: bool = flax.struct.field(pytree_node=False, default=True)

    @property
    def head(self) -> Array:
        """The weights of the head."""
        return self.embedding if self.output is None else self.output


@flax.struct.dataclass
class LayerNormParams:
    """The weights of a layer norm."""

    weight: Array
    bias: Array | None


class ParamSpecs:
    """Makes the specs of a model's parameters, in `dtype` and laid out for the shards of a deployment."""

    def __init__(self, model: AnyModel, dtype: np.dtype) -> None:
        self._model = model
        self._config = model.config
        self._dtype = dtype

    def embedding(
        self, name: str = "model.embed_tokens.weight", size: tuple[int, int] | None = None, *, inputs: int = 0
    ) -> Any:
        """Return the embedding `[vocabulary, dim]`, or a table of another `size`; with `inputs=1`, an untied head."""
        rows, dim = size or (self._config.vocab_size, self._config.hidden_size)
        padding = -rows % self._model.shards
        parts = (TensorPart(name, (rows, dim), (0, 0)),)
        return self.spec((rows + padding, "vocab"), (dim, None), padding=padding, inputs=inputs, parts=parts)

    def head(self) -> Any:
        """Return the head `[vocabulary, dim]`, None if it is tied to the embedding, or if the model has none."""
        tied = self._config.tie_word_embeddings or not self._config.generates
        return None if tied else self.embedding("lm_head.weight", inputs=1)

    def pooled(self) -> tuple[PooledParams, ...]:
        """Return the weights of the layers after pooling."""
        pooling = self._config.pooling
        return () if pooling is None else tuple(map(self._pooled_layer, pooling.layers))

    def _pooled_layer(self, layer: PooledLayer) -> PooledParams:
        outputs, inputs = layer.outputs, layer.inputs
        parts: tuple[TensorPart, ...] = (TensorPart(f"{layer.name}.weight", (outputs, inputs), (0, 0)),)
        if layer.tokens:
            head = "model.embed_tokens.weight" if self._config.tie_word_embeddings else "lm_head.weight"
            parts = tuple(
                TensorPart(head, (1, inputs), (i, 0), first_row=token, some_rows=True)
                for i, token in enumerate(layer.tokens)
            )
        weight, bias, norm = self._padded(parts, outputs, inputs), None, None
        if layer.has_bias:
            own = self.vector(f"{layer.name}.bias", outputs, "zeros")
            bias = dataclasses.replace(own, shape=(outputs + weight.padding,), padding=weight.padding)
        if layer.norm:
            norm = self.layer_norm(layer.norm, bias=layer.norm_has_bias, size=outputs)
        return PooledParams(weight, bias, norm)

    def decoder(self, layer: Callable[[str], Any], norm: Any = None) -> Params:
        """Return all weights of a model. `layer` returns the weights of the layer whose tensors' names begin with its
        argument; `norm` has the weights of the last norm, by default a vector."""
        layers = tuple(layer(f"model.layers.{i}") for i in range(self._config.num_layers))
        return Params(self.embedding(), layers, norm or self.vector("model.norm.weight"), self.head())

    def matrix(self, name: str, out_dim: int, in_dim: int) -> Any:
        """Return the weight `[out_dim, in_dim]` of a linear layer that every shard has whole."""
        return dataclasses.replace(self.table(name, out_dim, in_dim), inputs=1)

    def table(self, name: str, rows: int, columns: int) -> Any:
        """Return a table whose rows are looked up, and which every shard has whole."""
        return self.spec((rows, None), (columns, None), parts=(TensorPart(name, (rows, columns), (0, 0)),))

    def vector(self, name: str, size: int | None = None, init: Initializer = "ones") -> Any:
        """Return a vector, by default of the model's width."""
        size = size or self._config.hidden_size
        return self.spec((size, None), init=init, parts=(TensorPart(name, (size,), (0,)),))

    def wide_norm(self, name: str, size: int | None = None) -> Any:
        """Return the weight of a norm that multiplies in float32, in float32."""
        return self.wide(self.vector(name, size))

    def wide(self, spec: Any) -> Any:
        """Return a spec in float32."""
        return dataclasses.replace(spec, dtype=_WIDE)

    def offset_norm(self, name: str, size: int | None = None) -> Any:
        """Return the weight of a norm of which the checkpoint stores the difference to one, in float32."""
        spec = self.wide_norm(name, size)
        [part] = spec.parts
        return dataclasses.replace(spec, parts=(dataclasses.replace(part, offset=1.0),))

    def layer_norm(self, name: str, *, bias: bool, size: int | None = None) -> Any:
        """Return the weights of a layer norm, by default of the model's width."""
        return LayerNormParams(
            self.vector(f"{name}.weight", size), self.vector(f"{name}.bias", size, "zeros") if bias else None
        )

    def attention(
        self,
        name: str,
        rope: RopeConfig,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        fused: str | None = None,
        q_norm: Any = None,
        k_norm: Any = None,
        heads: tuple[int, int] | None = None,
        projections: str = "qkv",
        sinks: bool = False,
        gated: bool = False,
        inputs: int | None = None,
        names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    ) -> Any:
        """Return the attention weights under `name`; `fused` is the name of one projection for all of q, k and v.

        `names` are those of the projections: of queries, keys, values and outputs.

        `heads` are a layer's own number of KV heads and their size, before they are repeated for shards. `projections`
        names the projections of the layer: "qk" if its keys are its values too, "q" if it uses the keys and values of
        another layer. With `sinks`, each query head has a logit of its own. If it is `gated`, the projection of queries
        has the gate of a head after its query. `inputs` is the width of the vectors that are projected, by default the
        model's.
        """
        config = self._config
        stored, head = heads or (config.num_kv_heads, config.head_dim)
        dim, replicas, shared = config.hidden_size, self._model.replicas_of(stored), len(projections) - 1
        inputs = inputs or dim
        kv_heads = stored * replicas
        stored_group, group = config.num_heads // stored, config.num_heads // kv_heads
        order = head_order(rope, head)
        assert order is None or projections != "qk", "values have the order of the checkpoint"
        # Every replica of a KV head computes its keys and values; its queries are divided between the replicas.
        qkv: dict[str, Any] = {"kv_replicas": replicas, "kv_shared": shared}
        # Hugging Face's checkpoints may hold keys and values of a layer that uses those of another
        others = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias", "k_norm.weight", "v_norm.weight")
        unused = tuple(f"{name}.{other}" for other in others) if projections == "q" else ()

        def of_heads(kind: str, second: int, *inner: int) -> list[TensorPart]:
            """Return the part of each query head: its query, or its gate, which is the second."""
            return [
                TensorPart(
                    f"{name}.q_proj.{kind}",
                    (1, 1, head, *inner),
                    (*divmod(at, stored_group), 0, *(0 for _ in inner)),
                    first_row=(2 * at + second) * head,
                    order=None if second or order is None else Order(2, order),
                )
                for at in range(config.num_heads)
            ]

        def parts(kind: str, *inner: int) -> tuple[TensorPart, ...]:
            found, row = of_heads(kind, 0, *inner) if gated else [], 0
            for start, letter, own in zip((0, stored_group, stored_group + 1), projections, names):
                if gated and letter == "q":
                    continue
                members = stored_group if letter == "q" else 1
                found.append(
                    TensorPart(
                        f"{name}.{fused or own}.{kind}",
                        (stored, members, head, *inner),
                        (0, start, 0, *(0 for _ in inner)),
                        first_row=row if fused else 0,
                        order=Order(2, order) if order and letter != "v" else None,
                    )
                )
                row += stored * members * head
            return tuple(found)

        rows = (kv_heads, "kv_heads"), (group + shared, None), (head, None)
        into = (dim, None), (kv_heads, "kv_heads"), (group, None), (head, None)
        gates = (kv_heads, "kv_heads"), (group, None), (head, None), (inputs, None)
        output_parts = (TensorPart(f"{name}.{names[3]}.weight", (dim, stored, stored_group, head), (0, 0, 0, 0)),)
        return AttentionParams(
            qkv=self.spec(*rows, (inputs, None), inputs=1, parts=parts("weight", inputs), unused=unused, **qkv),
            output=self.spec(*into, inputs=3, kv_replicas=replicas, parts=output_parts),
            qkv_bias=self.spec(*rows, init="zeros", parts=parts("bias"), **qkv) if qkv_bias else None,
            output_bias=self.vector(f"{name}.{names[3]}.bias", init="zeros") if output_bias else None,
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=(
                self.spec(
                    (kv_heads, "kv_heads"),
                    (group, None),
                    kv_replicas=replicas,
                    parts=(TensorPart(f"{name}.sinks", (stored, stored_group), (0, 0)),),
                )
                if sinks
                else None
            ),
            gate=(
                self.spec(*gates, inputs=1, kv_replicas=replicas, parts=tuple(of_heads("weight", 1, inputs)))
                if gated
                else None
            ),
        )

    def norm_of_head(self, name: str, rope: RopeConfig, *, offset: bool = False) -> Any:
        """Return the weight of a norm of each head, in the order in which `rope` has its dimensions; with `offset`, as
        `offset_norm`."""
        spec = (self.offset_norm if offset else self.vector)(name, self._config.head_dim)
        return dataclasses.replace(spec, parts=(self._ordered(spec.parts[0], rope),))

    def _ordered(self, part: TensorPart, rope: RopeConfig) -> TensorPart:
        order = head_order(rope, self._config.head_dim)
        return part if order is None else dataclasses.replace(part, order=Order(len(part.shape) - 1, order))

    def norm_of_heads(self, name: str, *, queries: bool, rope: RopeConfig) -> Any:
        """Return the weight of a norm over all query heads, or all KV heads, of a token, in float32."""
        config = self._config
        stored = config.num_kv_heads
        replicas = self._model.replicas_of(stored)
        members = config.num_heads // stored if queries else 1
        spec = self.spec(
            (stored * replicas, "kv_heads"),
            (members // replicas if queries else 1, None),
            (config.head_dim, None),
            init="ones",
            kv_replicas=replicas,
            kv_shared=0 if queries else 1,
            parts=(self._ordered(TensorPart(name, (stored, members, config.head_dim), (0, 0, 0)), rope),),
        )
        return self.wide(spec)

    def mlp(
        self,
        name: str,
        *ups: str,
        down: str = "down_proj",
        bias: bool = False,
        fused: str | None = None,
        width: int | None = None,
    ) -> Any:
        """Return the weights of a feed-forward block under `name`, by default of the model's `intermediate_size`.

        `ups` are the projections whose outputs the activation joins, by default gate and up; `fused` is the name of one
        projection for both.
        """
        dim, ffn = self._config.hidden_size, width or self._config.intermediate_size
        names = [fused] if fused else ups or ("gate_proj", "up_proj")
        matrices = 2 if fused else len(names)

        def parts(kind: str, *inner: int) -> tuple[TensorPart, ...]:
            each = matrices // len(names)
            return tuple(
                TensorPart(f"{name}.{up}.{kind}", (each, ffn, *inner), (i, 0, *(0 for _ in inner)))
                for i, up in enumerate(names)
            )

        return MlpParams(
            up=self.spec((matrices, None), (ffn, "mlp"), (dim, None), inputs=1, parts=parts("weight", dim)),
            down=self.spec(
                (dim, None), (ffn, "mlp"), inputs=1, parts=(TensorPart(f"{name}.{down}.weight", (dim, ffn), (0, 0)),)
            ),
            up_bias=self.spec((matrices, None), (ffn, "mlp"), init="zeros", parts=parts("bias")) if bias else None,
            down_bias=self.vector(f"{name}.{down}.bias", init="zeros") if bias else None,
        )

    def router(self, name: str, experts: int, *, bias: bool = False, correction: str | None = None) -> RouterParams:
        """Return the weights of a router; `correction` is the name of its tensor."""
        return RouterParams(
            self.few_outputs(f"{name}.weight", experts),
            self.vector(f"{name}.bias", experts, "zeros") if bias else None,
            None if correction is None else self.wide_norm(correction, experts),
        )

    def few_outputs(self, name: str, outputs: int) -> Any:
        """Return the weight of a product with few `outputs`, with rows of zeros, so that every kernel takes it."""
        dim = self._config.hidden_size
        return self._padded((TensorPart(name, (outputs, dim), (0, 0)),), outputs, dim)

    def _padded(self, parts: tuple[TensorPart, ...], outputs: int, inputs: int) -> Any:
        padding = -outputs % _ROWS_OF_KERNELS
        return self.spec((outputs + padding, None), (inputs, None), inputs=1, padding=padding, parts=parts)

    def experts(self, name: str, projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Any:
        """Return the weights of experts that have tensors of their own; `projections` are gate, up and down."""
        dim, width, count = self._config.hidden_size, self._config.expert_size, self._config.num_experts
        *ups, down = projections
        return self._experts(
            tuple(
                TensorPart(f"{name}.{expert}.{up}.weight", (1, 1, width, dim), (expert, i, 0, 0))
                for expert in range(count)
                for i, up in enumerate(ups)
            ),
            tuple(
                TensorPart(f"{name}.{expert}.{down}.weight", (1, dim, width), (expert, 0, 0)) for expert in range(count)
            ),
        )

    def stacked_experts(
        self, name: str, *, transposed: bool = False, interleaved: bool = False, bias: bool = False
    ) -> Any:
        """Return the weights of experts that share the tensors `gate_up_proj` and `down_proj`.

        Unless they are `transposed`, inputs come last; if they are `interleaved`, a row of gate alternates with one of
        up.
        """
        dim, width, count = self._config.hidden_size, self._config.expert_size, self._config.num_experts
        rows = (width, 2) if interleaved else (2, width)
        order = (0, 2, 1) if interleaved else (0, 1, 2)
        inputs_last = View((count, *rows, dim), (*order, 3)) if interleaved else None
        across = View((count, dim, *rows), (0, *(axis + 1 for axis in order[1:]), 1)) if transposed else inputs_last
        down = View((count, width, dim), (0, 2, 1)) if transposed else None
        found = self._experts(
            (_viewed(f"{name}.gate_up_proj", (count, 2, width, dim), across, inputs_last),),
            (_viewed(f"{name}.down_proj", (count, dim, width), down, None),),
        )
        if not bias:
            return found
        up_bias = _viewed(
            f"{name}.gate_up_proj_bias", (count, 2, width), View((count, *rows), order) if interleaved else None, None
        )
        down_bias = TensorPart(f"{name}.down_proj_bias", (count, dim), (0, 0))
        axis = found.up.axes[0]
        return dataclasses.replace(
            found,
            up_bias=self.spec((count, axis), (2, None), (width, "expert_mlp"), init="zeros", parts=(up_bias,)),
            down_bias=self.spec((count, axis), (dim, None), init="zeros", parts=(down_bias,)),
        )

    def _experts(self, ups: tuple[TensorPart, ...], downs: tuple[TensorPart, ...]) -> Any:
        dim, width = self._config.hidden_size, self._config.expert_size
        experts = self._config.num_experts, EXPERT_AXES[self._model.experts_over_ranks]
        return ExpertParams(
            up=self.spec(experts, (2, None), (width, "expert_mlp"), (dim, None), inputs=1, parts=ups),
            down=self.spec(experts, (dim, None), (width, "expert_mlp"), inputs=1, parts=downs),
        )

    def spec(self, *dims: tuple[int, str | None], init: Initializer = "normal", **layout: Any) -> Any:
        """Return a spec with these dimensions, each with its axis."""
        sizes, axes = zip(*dims)
        spec = ParamSpec(sizes, self._dtype, axes, init, **layout)
        return dataclasses.replace(spec, scale=spec.stored_shape[-1] ** -0.5)


def _viewed(name: str, shape: tuple[int, ...], view: View | None, quantized: View | None) -> TensorPart:
    return TensorPart(name, shape, (0,) * len(shape), view=view, quantized_view=quantized)
