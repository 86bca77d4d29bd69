from __future__ import annotations

from jaxserve.engine.client.prefix_index import PrefixIndex, page_names


def names(*tokens: int, namespace: str = "") -> list[int]:
    return page_names(namespace, tokens, 2)


def test_a_page_is_known_by_all_before_it() -> None:
    one, two = names(1, 2, 3, 4, 5), names(9, 2, 3, 4)
    assert len(one) == 2, "the last page is not whole"
    assert names(1, 2, 3, 4, 7, 8)[:2] == one
    assert one[1] != two[1]
    assert names(1, 2, namespace="salt") != names(1, 2)


def test_prefixes_are_found_as_far_as_they_agree() -> None:
    index = PrefixIndex(8)
    index.use(names(1, 2, 3, 4, 5, 6))
    assert index.match(names(1, 2, 3, 4, 7, 8)) == 2
    assert index.match(names(3, 4)) == 0
    assert index.match(names(1, 2, namespace="salt")) == 0
    index.clear()
    assert index.match(names(1, 2)) == 0


def test_what_was_not_used_for_longest_is_forgotten_ends_first() -> None:
    index = PrefixIndex(4)
    index.use(names(1, 1, 2, 2, 3, 3))
    index.use(names(1, 1, 9, 9))
    assert len(index) == 4
    index.use(names(8, 8))
    assert index.match(names(1, 1, 2, 2, 3, 3)) == 2, "its end has gone"
    assert index.match(names(1, 1, 9, 9)) == 2
    index.use(names(7, 7, 6, 6, 5, 5))
    assert index.match(names(1, 1, 9, 9)) == 0
    assert index.match(names(8, 8)) == 1
    assert len(index) == 4


def test_outputs_take_room_too() -> None:
    index = PrefixIndex(4)
    index.use(names(1, 1, 2, 2))
    index.fill(3)
    assert (len(index), index.match(names(1, 1, 2, 2))) == (4, 1)


def test_an_engine_without_a_cache_has_nothing() -> None:
    index = PrefixIndex(0)
    index.use(names(1, 1))
    index.fill(2)
    assert (len(index), index.match(names(1, 1))) == (0, 0)
