"""Heads that draft, written as checkpoints of random numbers, and what they would draft, computed in one go."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file

from jaxserve.engine.core.loop import EngineLoop
from jaxserve.layers.axes import TENSOR_AXES
from jaxserve.models.draft_heads import mtp
from jaxserve.models.layout import LaidOutModel
from jaxserve.models.registry import abstract_params, family, forward, parse_draft_head, parse_model_config
from jaxserve.runtime.devices.mesh import partitions
from jaxserve.runtime.sizing.deployment import Deployment
from jaxserve.runtime.step.program import ProgramKey
from jaxserve.step_plan import StepPlan
from pallas_kernels.paged_attention import REFERENCE
from tests.models.forward import cpu_mesh, empty_pools, whole_prompt
from tests.tiny_model import write_tiny_model
from tests.weights.conftest import random_checkpoint

HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1},
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 200,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
}
"""Fields of a head's config besides the sizes of its model."""


def write_checkpoint(folder: Path, config: dict[str, Any], *abstract: Any) -> Path:
    """Write a config and random weights for the parameters of some trees, and return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    rng, tensors = np.random.default_rng(0), {}
    for tree in abstract:
        for name, values in random_checkpoint(tree).items():
            if name == "d2t":
                ids = rng.choice(config["vocab_size"], len(values), replace=False)
                tensors[name] = np.sort(ids) - np.arange(len(values))
            elif values.ndim == 1:
                tensors[name] = 1 + values / 8
            else:
                tensors[name] = values * np.float32(values.shape[-1] ** -0.5)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_target_and_head(folder: Path, model: dict[str, Any], method: str) -> dict[str, Any]:
    """Write a tiny model and a head that drafts for it, and return the settings that name them."""
    f32, target = np.dtype(np.float32), parse_model_config(model)
    trees = [abstract_params(LaidOutModel(target), f32)]
    settings = {"model": str(folder / "model"), "speculative_method": method}
    if method == "mtp":
        trees.append(mtp.abstract(LaidOutModel(mtp.config_of(target)), f32))
    else:
        raw = {name: value for name, value in model.items() if name != "model_type"} | HEADS[method]
        head = parse_draft_head(raw, "head", method, ())
        write_checkpoint(folder / "head", raw, abstract_params(LaidOutModel(head), f32))
        settings["speculative_model"] = str(folder / "head")
    (folder / "model").mkdir()
    write_tiny_model(folder / "model")
    write_checkpoint(folder / "model", model, *trees)
    return settings


class NaiveDrafts:
    """The drafts of a deployment's head, from its weights; each is computed from the whole sequence."""

    def __init__(self, deployment: Deployment, loop: EngineLoop, longest: int) -> None:
        leaves = loop._executor._commands._params  # type: ignore[attr-defined]
        params = jax.tree.unflatten(jax.tree.structure(deployment.all_params), leaves)
        drafting = deployment.drafting
        assert drafting is not None
        assert drafting.model is not None
        target, head, size = deployment.model, drafting.model, longest

        def features_of(params: Any, tokens: jax.Array, length: jax.Array) -> jax.Array:
            kv = empty_pools(target, size)
            own = whole_prompt(tokens, length, len(kv))
            x = family(target).embed(target, params[0], own)
            return family(head).features(head, params[1], forward(target, params[0], x, own, kv, REFERENCE))

        def next_of(
            params: Any, tokens: jax.Array, length: jax.Array, features: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            own, kv = whole_prompt(tokens, length), empty_pools(head, size)
            embedded = family(target).embed(target, params[0], own)
            found = family(head).forward(head, params[1], embedded, features, own, kv, REFERENCE).hidden
            of_target = functools.partial(family(target).head, target, params[0])
            logits = family(head).logits(head, params[1], found, of_target)
            logits = jnp.where(jnp.arange(logits.shape[1]) < target.config.vocab_size, logits, -jnp.inf)
            return found, logits

        specs, none = partitions(deployment.all_params), PartitionSpec()

        def compiled(function: Any, arguments: int, out: Any) -> Any:
            parts = (specs, *(none,) * arguments)
            return jax.jit(jax.shard_map(function, mesh=cpu_mesh(), in_specs=parts, out_specs=out, check_vma=False))

        self._features = compiled(features_of, 2, none)
        self._next = compiled(next_of, 3, (none, PartitionSpec(None, TENSOR_AXES)))
        self._params, self._size = params, size
        self.target = target, params[0]

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the draft after a sequence, of which the last token isn't computed yet, for greedy sampling."""
        last = len(tokens) - 1
        features = np.array(self._features(self._params, self._padded(tokens), np.int32(last)))
        drafted: list[int] = []
        for ahead in range(count):
            known = [*tokens[1:], *drafted]
            found, logits = self._next(self._params, self._padded(known), np.int32(last + ahead), features)
            drafted.append(int(np.argmax(logits[last - 1 + ahead])))
            features[last + ahead] = found[last - 1 + ahead]
        return drafted

    def _padded(self, tokens: Sequence[int]) -> np.ndarray:
        return np.array([*tokens, *[0] * (self._size - len(tokens))], np.int32)


class WatchedDrafts:
    """Notes each draft that an engine makes with a head: the request, the sequence before the draft, and its tokens."""

    def __init__(self, loop: EngineLoop) -> None:
        self.made: list[tuple[str, tuple[int, ...], list[int]]] = []
        executor = loop._executor
        self._commands = executor._commands  # type: ignore[attr-defined]
        self._dispatch, self._run = executor.dispatch, self._commands.call
        self._plan: StepPlan | None = None
        executor.dispatch = self._remember  # type: ignore[method-assign]
        self._commands.call = self._watch

    def _remember(self, plan: StepPlan) -> object:
        self._plan = plan
        return self._dispatch(plan)

    def _watch(self, key: ProgramKey, packed: np.ndarray, *rows: Any) -> Any:
        output = self._run(key, packed, *rows)
        if key.kind == "draft":
            assert self._plan is not None
            leaves = self._commands._state
            by_slot = [leaf for leaf in leaves if leaf.ndim == 2 and leaf.dtype == np.int32]
            tokens, history, computed = (np.array(leaf) for leaf in (leaves[-6], leaves[-4], by_slot[1]))
            for chunk in self._plan.chunks:
                if chunk.length > 1:
                    at = chunk.rank, chunk.slot
                    known = tuple(history[at][: computed[at] + 1].tolist())
                    self.made.append((chunk.request_id, known, tokens[at][: chunk.length - 1].tolist()))
        return output
