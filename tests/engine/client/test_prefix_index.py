from __future__ import annotations

from jaxserve.engine.client.prefix_index import PrefixIndex, page_names


def names(*tokens: int, namespace: str = "") -> list[int]:
    return page_names(namespace, tokens, 2)


def test_the_name_of_a_page_depends_on_all_tokens_before_it() -> None:
    one, two = names(1, 2, 3, 4, 5), names(9, 2, 3, 4)
    assert len(one) == 2, "the last page is not whole"
    assert names(1, 2, 3, 4, 7, 8)[:2] == one
    assert one[1] != two[1]
    assert names(1, 2, namespace="salt") != names(1, 2)


def test_a_match_ends_where_prefixes_differ() -> None:
    index = PrefixIndex(8)
    index.add(names(1, 2, 3, 4, 5, 6))
    assert index.match(names(1, 2, 3, 4, 7, 8)) == 2
    assert index.match(names(3, 4)) == 0
    assert index.match(names(1, 2, namespace="salt")) == 0
    index.clear()
    assert index.match(names(1, 2)) == 0


def test_the_end_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    index = PrefixIndex(4)
    index.add(names(1, 1, 2, 2, 3, 3))
    index.add(names(1, 1, 9, 9))
    assert len(index) == 4
    index.add(names(8, 8))
    assert index.match(names(1, 1, 2, 2, 3, 3)) == 2, "its end was evicted"
    assert index.match(names(1, 1, 9, 9)) == 2
    index.add(names(7, 7, 6, 6, 5, 5))
    assert index.match(names(1, 1, 9, 9)) == 0
    assert index.match(names(8, 8)) == 1
    assert len(index) == 4


def test_outputs_take_room_too() -> None:
    index = PrefixIndex(4)
    index.add(names(1, 1, 2, 2))
    index.add_outputs(3)
    assert (len(index), index.match(names(1, 1, 2, 2))) == (4, 1)


def test_an_engine_without_a_cache_matches_nothing() -> None:
    index = PrefixIndex(0)
    index.add(names(1, 1))
    index.add_outputs(2)
    assert (len(index), index.match(names(1, 1))) == (0, 0)
