"""What a model computes for its clients: tokens, one vector for each sequence (pooled from its hidden states), or both.

Vectors are embeddings, or the logits of labels. What the engine computes of them is a `Pooling`; a `PooledTask` says
what they are for, and what the host makes of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

PoolingMethod = Literal["last", "mean", "cls", "all"]
LayerActivation = Literal["none", "tanh", "relu", "gelu", "silu", "sigmoid"]
LabelActivation = Literal["none", "sigmoid", "softmax"]
PooledUse = Literal["embed", "token_embed", "classify", "score"]


@dataclasses.dataclass(frozen=True)
class PooledLayer:
    """A linear layer `[outputs, inputs]` after pooling, and the activation after it.

    Its tensors in the checkpoint are `name.weight`, and `name.bias` if it `has_bias`. With `tokens`, the weight has the
    rows of these ids in the model's head instead. A layer norm of the name `norm` follows the activation, if it isn't
    empty, with a bias if it `norm_has_bias`.
    """

    name: str
    inputs: int
    outputs: int
    has_bias: bool = False
    activation: LayerActivation = "none"
    tokens: tuple[int, ...] = ()
    norm: str = ""
    norm_has_bias: bool = True
    norm_eps: float = 1e-5


@dataclasses.dataclass(frozen=True)
class Pooling:
    """How a vector is made of a sequence: of the hidden state of its `last` or first token (`cls`), or of the `mean` of
    all. With `all`, each token gets one. Then `layers` follow."""

    method: PoolingMethod
    layers: tuple[PooledLayer, ...] = ()

    def size(self, hidden_size: int) -> int:
        """Return the numbers of a vector, of a model with hidden states of this size."""
        return self.layers[-1].outputs if self.layers else hidden_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledTask:
    """What pooled vectors of `size` numbers are for: embeddings, or the logits of `labels`.

    - Embeddings are normalized to length 1 if `normalize`. If `dimensions` isn't empty, they may be cut to these.
    - The `activation` turns logits of labels into probabilities or scores. With `scores_pairs`, the last label says how
      well a document answers a query.
    - Texts get the prompt `default_prompt` of `prompts` in front, "" for none. They may have `max_tokens` tokens, if
      it isn't None.
    - `pair_template` names how a query and a document become one text; "" is the tokenizer's own form of pairs. A chat
      template that renders them gets `template_arguments`.
    """

    kind: Literal["embed", "classify"]
    pooling: Pooling
    size: int
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    activation: LabelActivation = "none"
    labels: tuple[str, ...] = ()
    scores_pairs: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str = ""
    max_tokens: int | None = None
    pair_template: str = ""
    template_arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def uses(self) -> tuple[PooledUse, ...]:
        """What its vectors can be asked for: embeddings of texts or of their tokens, labels of texts, scores of
        pairs."""
        if self.kind == "embed":
            return "token_embed" if self.pooling.method == "all" else "embed", "score"
        return ("classify", "score") if self.scores_pairs else ("classify",)


@dataclasses.dataclass(frozen=True)
class ModelTask:
    """What an engine serves: whether it generates tokens, and what it pools, None if nothing."""

    generates: bool = True
    pooled: PooledTask | None = None
