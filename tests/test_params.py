"""Checks that the windows of all shards together give the parameter on the mesh."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxserve.params import ParamSpec, Window

F32 = np.dtype(np.float32)


def _shards(spec: ParamSpec, stored: np.ndarray, axis: int, count: int) -> list[np.ndarray]:
    size = spec.shape[axis] // count
    shards = []
    for i in range(count):
        index = tuple(slice(i * size, (i + 1) * size) if a == axis else slice(None) for a in range(len(spec.shape)))
        shards.append(_part(spec, stored, index))
    return shards


def _part(spec: ParamSpec, stored: np.ndarray, index: Window) -> np.ndarray:
    part = np.zeros([len(range(*at.indices(size))) for at, size in zip(index, spec.shape)], stored.dtype)
    for source, target in spec.windows(index):
        part[target] = stored[source]
    return part


def _stored(spec: ParamSpec) -> np.ndarray:
    return np.arange(1, 1 + np.prod(spec.stored_shape), dtype=np.float32).reshape(spec.stored_shape)


def test_a_plain_parameter_is_split_into_shards() -> None:
    spec = ParamSpec((6, 4), F32, ("vocab", None))
    stored = _stored(spec)
    np.testing.assert_array_equal(np.concatenate(_shards(spec, stored, 0, 3)), stored)


def test_padding_is_zero_and_comes_last() -> None:
    spec = ParamSpec((12, 2), F32, ("vocab", None), padding=5)
    stored = _stored(spec)
    whole = np.concatenate(_shards(spec, stored, 0, 4))
    np.testing.assert_array_equal(whole[:7], stored)
    assert not whole[7:].any()


@pytest.mark.parametrize(("replicas", "group"), list(itertools.product([1, 2, 4], [4, 8])))
def test_replicas_of_a_kv_head_share_its_keys_and_divide_its_queries(replicas: int, group: int) -> None:
    kv_heads = 3
    shape = (kv_heads * replicas, group // replicas + 2, 2, 5)
    axes = ("kv_heads", None, None, None)
    spec = ParamSpec(shape, F32, axes, kv_replicas=replicas, kv_shared=2)
    assert spec.stored_shape == (kv_heads, group + 2, 2, 5)
    stored = _stored(spec)
    shards = _shards(spec, stored, 0, kv_heads * replicas)
    for head in range(kv_heads):
        own = shards[head * replicas : (head + 1) * replicas]
        np.testing.assert_array_equal(np.concatenate([shard[0, :-2] for shard in own]), stored[head, :group])
        for shard in own:
            np.testing.assert_array_equal(shard[0, -2:], stored[head, group:])
    np.testing.assert_array_equal(np.concatenate(shards), _part(spec, stored, (slice(None),) * 4))


def test_the_axis_after_the_heads_is_divided() -> None:
    spec = ParamSpec((5, 4, 2, 3), F32, (None, "kv_heads", None, None), kv_replicas=2)
    stored = _stored(spec)
    assert stored.shape == (5, 2, 4, 3)
    np.testing.assert_array_equal(np.concatenate(_shards(spec, stored, 1, 4), axis=1), stored.reshape(spec.shape))
