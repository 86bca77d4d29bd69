"""What a pipeline stage has of a model: its layers, their places in the KV groups, and its parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.models.layout import AnyModel, LaidOutModel, Stage
from jaxserve.models.registry import abstract_params, parse_model_config, stage_params
from jaxserve.weights.arrays import flatten
from jaxserve.weights.dummy import dummy_reader
from tests.models.golden import golden_config
from tests.tiny_model import CONFIG

F32 = np.dtype(np.float32)


def _stages(model: AnyModel, *ends: int) -> list[AnyModel]:
    firsts = [0, *ends[:-1]]
    stages = [Stage(i, len(ends), first, end) for i, (first, end) in enumerate(zip(firsts, ends, strict=True))]
    return [dataclasses.replace(model, stage=stage) for stage in stages]


def _paths(params: Any) -> set[Any]:
    return {path for path, _ in flatten(params)[0]}


def test_stages_have_the_groups_of_the_whole_model_and_count_their_own_layers() -> None:
    config = golden_config("gemma3")  # layers with a window, and one of whole sequences
    whole = LaidOutModel(config)
    first, last = _stages(whole, 1, config.num_layers)
    assert [dataclasses.replace(spec, num_layers=0) for spec in first.kv_specs()] == [
        dataclasses.replace(spec, num_layers=0) for spec in whole.kv_specs()
    ]
    counts = [[spec.num_layers for spec in model.kv_specs()] for model in (first, last, whole)]
    assert [one + two for one, two in zip(*counts[:2])] == counts[2]
    places = last.kv_layers()
    for group in range(len(counts[1])):
        own = [int(places[i].index) for i in last.layers if places[i].group == group]
        assert own == list(range(counts[1][group]))


def test_stages_have_all_parameters_between_them_under_the_same_paths() -> None:
    whole = LaidOutModel(parse_model_config(CONFIG | {"num_hidden_layers": 5, "tie_word_embeddings": False}))
    params = abstract_params(whole, F32)
    own = [_paths(stage_params(params, model)) for model in _stages(whole, 2, 4, 5)]
    assert set.union(*own) == _paths(params)
    assert sum(map(len, own)) == len(_paths(params))
    assert [("embedding",) in one for one in own] == [True, False, False]
    assert [("output",) in one for one in own] == [False, False, True]
    assert all(path[1] in (2, 3) for path in own[1]), own[1]


@pytest.mark.parametrize(("tied", "head"), [(False, False), (True, False), (False, True)])
def test_the_last_stage_has_the_embedding_if_it_is_the_head_or_a_draft_needs_it(tied: bool, head: bool) -> None:
    whole = LaidOutModel(parse_model_config(CONFIG | {"tie_word_embeddings": tied}))
    first, last = _stages(whole, 1, 2)
    params = abstract_params(whole, F32)
    assert stage_params(params, first, embeds=False).embedding is not None
    assert (stage_params(params, last, embeds=head).embedding is not None) == (tied or head)
    assert stage_params(params, whole) is params


def test_a_mixture_counts_the_experts_of_its_own_layers() -> None:
    config = golden_config("glm4_moe")
    first, last = _stages(LaidOutModel(config), 1, config.num_layers)
    assert (*first.mixture_layers, *last.mixture_layers) == config.mixture_layers
    assert len(last.mixture_layers) > 0


def test_a_reader_of_a_stage_reads_what_the_whole_model_would_get() -> None:
    whole = LaidOutModel(parse_model_config(CONFIG | {"num_hidden_layers": 3}))
    params = abstract_params(whole, F32)
    reader = dummy_reader(params, 0)
    read: list[Any] = []
    watched = dataclasses.replace(
        reader, fill=lambda path, *more: read.append(path), order=tuple(reversed(reader.order))
    )
    _, last = _stages(whole, 1, 3)
    part = stage_params(params, last)
    of_part = watched.of_part(params, part)
    leaves = flatten(part)[0]
    assert sorted(of_part.order) == list(range(len(jax.tree.leaves(part))))
    for i in of_part.order:
        of_part.fill(leaves[i][0], leaves[i][1], (), np.zeros(1))
    all_paths = [path for path, _ in flatten(params)[0]]
    assert read == [path for path in reversed(all_paths) if path in _paths(part)]
