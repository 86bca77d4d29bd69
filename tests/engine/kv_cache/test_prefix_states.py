"""Snapshots of states in the prefix tree. Pages have two tokens."""

from __future__ import annotations

from jaxserve.engine.kv_cache.host_tier import HostTier, WritePolicy
from jaxserve.engine.kv_cache.page_pool import PagePool
from jaxserve.engine.kv_cache.prefix_states import PrefixStates, StartRows
from jaxserve.engine.kv_cache.radix_cache import RadixCache
from jaxserve.engine.kv_cache.radix_node import RadixNode
from jaxserve.engine.kv_cache.state_pool import ON_DEVICE, StatePool

SIZE = 2
LONG = [1, 2, 3, 4, 5, 6, 7, 8]


class Tree:
    """A cache with `num_states` rows of states, and room for copies in host memory if there are `num_copies`."""

    def __init__(
        self, num_states: int = 4, num_copies: int = 0, num_pages: int = 16, policy: WritePolicy = "write_back"
    ) -> None:
        self.pages = PagePool(num_pages, SIZE)
        self.pool = StatePool(num_states)
        tier = HostTier(num_copies and 16, SIZE, policy, num_states=num_copies)
        self.cache = RadixCache(self.pages, tier, states=self.pool)
        self.tier = tier

    @property
    def states(self) -> PrefixStates:
        assert self.cache.states is not None
        return self.cache.states

    def keep(self, tokens: list[int], *snapshots: int) -> None:
        """Cache tokens, with a snapshot after each of these numbers of tokens."""
        self.cache.insert("", tokens, self.pages.allocate(len(tokens) // SIZE), 0)
        for count in snapshots:
            row = self.states.take()
            assert row is not None
            self.states.take_over(self.cache.end_of("", tokens[:count]), row)
        self.consistent()

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """Return how many tokens of a prompt have pages, and how many a state; the latter also as `match_length`."""
        node, pages = self.cache.match("", tokens, len(tokens))
        known = self.states.before(node)[1]
        assert known == self.cache.match_length("", tokens, len(tokens))
        return (len(pages) + self.cache.num_host_only(node)) * SIZE, known

    def start(self, tokens: list[int]) -> tuple[StartRows, int]:
        """Start a request as a rank does, whose row the caller keeps."""
        node, pages = self.cache.match("", tokens, len(tokens))
        return self.states.start(node, len(pages) + self.cache.num_host_only(node))

    def consistent(self, *rows: int) -> None:
        assert self.cache.check([]) == [f"state {row} is free or owned 0 times" for row in sorted(rows)]
        assert self.pages.check(self.cache.pages()) == []


def test_a_prefix_is_known_up_to_its_last_snapshot() -> None:
    tree = Tree()
    tree.keep(LONG, 4)
    assert tree.find(LONG) == (8, 4)
    assert tree.find([*LONG[:6], 9, 9]) == (6, 4)
    assert tree.find(LONG[:4]) == (4, 4)
    assert tree.find([*LONG[:2], 9, 9]) == (2, 0)
    tree.consistent()


def test_a_snapshot_in_the_middle_splits_a_node() -> None:
    tree = Tree()
    tree.keep(LONG, 2, 6, 8)
    assert [tree.find(LONG[:count])[1] for count in (2, 4, 6, 8)] == [2, 2, 6, 8]
    assert tree.pool.num_snapshots == 3


def test_a_node_with_a_snapshot_does_not_grow() -> None:
    tree = Tree()
    node, _ = tree.cache.match("", LONG, 0)
    tree.cache.lock(node)
    node, _ = tree.cache.extend(node, LONG[:4], tree.pages.allocate(2))
    row = tree.states.take()
    assert row is not None
    tree.states.take_over(node, row)
    node, taken = tree.cache.extend(node, LONG[4:], tree.pages.allocate(2), 2)
    assert (taken, node.length) == (2, 2)
    assert tree.find(LONG) == (8, 4)
    tree.cache.unlock(node)
    tree.consistent()


def test_a_second_snapshot_of_a_prefix_is_freed() -> None:
    tree = Tree()
    tree.keep(LONG, 4)
    row = tree.states.take()
    assert row is not None
    tree.states.take_over(tree.cache.end_of("", LONG[:4]), row)
    assert (tree.pool.num_snapshots, tree.pool.num_available) == (1, 4)
    tree.consistent()


def test_a_start_reads_the_snapshot_and_writes_a_row_of_its_own() -> None:
    tree = Tree()
    tree.keep(LONG, 6)
    node = tree.cache.end_of("", LONG[:6])
    assert node is not None
    rows, known = tree.start(LONG)
    assert (rows.source, known) == (node.states[ON_DEVICE], 6)
    assert rows.own != rows.source
    assert (tree.states.num_found, tree.states.num_recomputed_tokens) == (1, 2)
    tree.consistent(rows.own)
    assert tree.start([9, 9])[0].source is None


def test_the_snapshot_that_a_start_reads_is_not_given_away_in_its_plan() -> None:
    tree = Tree(num_states=2)
    tree.keep(LONG, 6)
    rows, _ = tree.start(LONG)
    assert tree.pool.num_available == 0
    assert tree.states.take() is None
    tree.states.start_plan()
    assert tree.states.take() == rows.source


def test_a_start_takes_the_snapshot_itself_if_there_is_no_other_row() -> None:
    tree = Tree(num_states=1)
    tree.keep(LONG, 6)
    rows, known = tree.start(LONG)
    assert (rows, known) == (StartRows(0, 0), 6)
    assert tree.find(LONG) == (8, 0)
    tree.consistent(0)


def test_a_snapshot_is_saved_before_a_start_takes_its_row() -> None:
    tree = Tree(num_states=1, num_copies=1)
    tree.keep(LONG, 6)
    assert tree.start(LONG) == (StartRows(0, 0), 6)
    assert tree.tier.take_copies() == ([(1, 0, 0)], [])
    assert tree.find(LONG) == (8, 6)


def test_the_snapshot_that_began_no_request_for_longest_is_evicted() -> None:
    tree = Tree(num_states=3)
    tree.keep(LONG, 2, 4)
    tree.keep([9, 9], 2)
    tree.start(LONG[:2])
    assert [tree.find(tokens)[1] for tokens in (LONG[:2], LONG[:4], [9, 9])] == [2, 2, 2]
    tree.states.start_plan()
    tree.states.take()
    assert [tree.find(tokens)[1] for tokens in (LONG[:2], LONG[:4], [9, 9])] == [2, 2, 0]
    assert tree.pool.num_evicted == 2


def test_evicted_pages_take_the_snapshots_with_them() -> None:
    tree = Tree()
    tree.keep(LONG, 4, 8)
    tree.cache.evict(1)
    assert (tree.find(LONG), tree.pool.num_snapshots) == ((6, 4), 1)
    tree.cache.evict(2)
    assert tree.pool.num_available == 4
    tree.consistent()


def test_a_flush_frees_all_snapshots() -> None:
    tree = Tree(num_copies=2, policy="write_through")
    tree.keep(LONG, 4, 8)
    tree.tier.save_added()
    assert tree.tier.states.num_snapshots == 2
    tree.cache.flush()
    assert (tree.pool.num_snapshots, tree.tier.states.num_snapshots) == (0, 0)
    assert tree.tier.take_copies() == ([], [])
    tree.consistent()


def test_nothing_is_kept_without_a_cache() -> None:
    pages, pool = PagePool(4, SIZE), StatePool(1)
    cache = RadixCache(pages, states=pool, disabled=True)
    node, _ = cache.match("", LONG, 8)
    assert cache.states is not None
    assert (cache.end_of("", LONG[:2]), cache.states.before(node)) == (None, (None, 0))


def _row_of(tree: Tree, tokens: list[int], place: int) -> int | None:
    node = tree.cache.end_of("", tokens)
    return None if node is None else node.states[place]


def test_an_evicted_snapshot_is_saved_and_loaded_again() -> None:
    tree = Tree(num_states=2, num_copies=1)
    tree.keep(LONG, 4)
    row = _row_of(tree, LONG[:4], 0)
    taken = [tree.states.take() for _ in range(2)]
    assert tree.tier.take_copies() == ([(1, row, 0)], [])
    assert tree.find(LONG) == (8, 4)
    for one in taken:
        assert one is not None
        tree.pool.release(one)
    rows, known = tree.start(LONG)
    assert known == 4
    assert tree.tier.take_copies() == ([], [(1, 0, rows.source)])
    assert rows.source == _row_of(tree, LONG[:4], 0) != rows.own
    assert tree.states.take() is None, "the row that is loaded is read in the same plan"
    tree.consistent(rows.own)


def test_a_copy_is_loaded_into_the_row_of_the_request_if_there_is_no_other() -> None:
    tree = Tree(num_states=1, num_copies=1)
    tree.keep(LONG, 4)
    row = tree.states.take()
    assert row is not None
    tree.pool.release(row)
    tree.tier.take_copies()
    rows, known = tree.start(LONG)
    assert (rows, known) == (StartRows(0, 0), 4)
    assert tree.tier.take_copies() == ([], [(1, 0, 0)])


def test_a_copy_that_is_loaded_is_not_overwritten_by_a_save_of_its_plan() -> None:
    tree = Tree(num_states=2, num_copies=1)
    tree.keep(LONG, 4)
    for row in [tree.states.take() for _ in range(2)]:
        assert row is not None
        tree.pool.release(row)
    tree.tier.take_copies()
    tree.states.start_plan()
    tree.keep([9, 9], 2)
    tree.keep([8, 8], 2)
    tree.start(LONG)
    saves, loads = tree.tier.take_copies()
    assert (saves, [slot for _, slot, _ in loads]) == ([], [0]), "there is no other slot to save to"


def test_write_through_saves_a_snapshot_with_its_pages() -> None:
    tree = Tree(num_copies=2, policy="write_through")
    tree.keep(LONG, 8)
    row = _row_of(tree, LONG, 0)
    tree.tier.save_added()
    saves, _ = tree.tier.take_copies()
    assert [page for group, page, _ in saves if group == 1] == [row]
    tree.states.take_over(tree.cache.end_of("", LONG[:4]), tree.states.take() or 0)
    tree.tier.save_added()
    assert [group for group, *_ in tree.tier.take_copies()[0]] == [1], "its pages were saved before"


def test_evicted_pages_and_their_state_are_found_in_host_memory() -> None:
    tree = Tree(num_copies=2)
    tree.keep(LONG, 4, 8)
    tree.cache.evict(4)
    assert tree.pool.num_snapshots == 0
    assert tree.find(LONG) == (8, 8)
    tree.consistent()


def test_pages_in_host_memory_without_a_state_are_not_used() -> None:
    tree = Tree(num_copies=1)
    tree.keep(LONG, 4)
    tree.cache.evict(4)
    assert tree.find(LONG) == (4, 4)
    tree.keep([7, 7], 2)
    tree.cache.evict(1)
    assert tree.find(LONG) == (0, 0), "the only copy of a state is that of the other prefix now"
    tree.consistent()


def test_the_check_finds_a_node_that_lost_its_pages_but_not_its_state() -> None:
    tree = Tree(num_copies=2)
    tree.keep(LONG, 8)
    node = tree.cache.end_of("", LONG)
    assert isinstance(node, RadixNode)
    tree.cache.evict(4)
    row = tree.states.take()
    assert row is not None
    tree.pool.give(node, row)
    assert "a cached run without pages has a state on the device" in tree.cache.check([])
