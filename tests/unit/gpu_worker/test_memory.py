"""The memory mapper against a slow twin, and what must always be true of it."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpu_worker.memory.ledger import Ledger
from gpu_worker.memory.mapper import DeviceMemory
from gpu_worker.memory.pages import PAGE_BYTES_MAX, PAGE_BYTES_MIN, PagePool, page_bytes_for, runs
from gpu_worker.memory.slots import TooLarge
from gpu_worker.memory.worth import HALF_LIFE_MS, Candidate, Likelihood, giving_way
from tests.examples import examples

PAGE = 10
TOTAL = 1_000


def device(total: int = TOTAL, host: int = 10_000) -> DeviceMemory:
    """Without workspace, so that numbers in tests are plain."""
    memory = DeviceMemory(total, PAGE, host)
    memory.workspace_bytes = 0
    return memory


def test_a_ledger_books_nothing_above_its_total_and_nothing_twice() -> None:
    ledger = Ledger(100)
    ledger.book("weights", "a", 60)
    with pytest.raises(ValueError, match="41 bytes of kv wanted, 40 of 100 are free"):
        ledger.book("kv", "a", 41)
    with pytest.raises(ValueError, match="a has booked weights already"):
        ledger.book("weights", "a", 1)
    assert ledger.give_back("weights", "a") == 60
    assert ledger.give_back("weights", "a") == 0
    assert ledger.balance().free == 100


def test_a_page_is_given_back_once() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    pool.give(pages)
    with pytest.raises(ValueError, match="page 0 is not taken"):
        pool.give(pages)
    with pytest.raises(ValueError, match="5 pages wanted"):
        pool.take(5)


def test_slots_need_no_neighbouring_pages() -> None:
    memory = device(100)
    for slot in (1, 2, 3, 4, 5):
        memory.add(slot, "e", 20, 0, {}, 0.0)
        memory.activate(slot)
        memory.arrived(slot)
    memory.evict(2)
    memory.evict(4)
    memory.add(6, "e", 40, 0, {}, 0.0)
    assert memory.activate(6) == (2, 3, 6, 7)
    assert runs((2, 3, 6, 7)) == [(2, 2), (6, 2)]


@given(st.integers(1, 1 << 45))
def test_pages_are_powers_of_two_within_their_bounds(size: int) -> None:
    page = page_bytes_for(size)
    assert PAGE_BYTES_MIN <= page <= PAGE_BYTES_MAX
    assert page & (page - 1) == 0


def test_likelihood_halves() -> None:
    likely = Likelihood(0.0)
    likely.used(0.0)
    likely.used(0.0)
    assert likely.at(HALF_LIFE_MS) == pytest.approx(1.0)


CANDIDATES = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 100)), max_size=8).map(
    lambda pairs: [Candidate(slot, size, worth) for slot, (size, worth) in enumerate(pairs)]
)


@given(CANDIDATES, st.integers(-5, 300))
def test_who_gives_way_is_enough_and_none_too_many(candidates: list[Candidate], wanted: int) -> None:
    """The slow twin tries every set."""
    sizes = {one.slot: one.size for one in candidates}
    gone = giving_way(candidates, wanted)
    possible = any(
        sum(one.size for one in some) >= wanted
        for count in range(len(candidates) + 1)
        for some in combinations(candidates, count)
    )
    assert (gone is not None) == possible
    if gone is None:
        return
    assert sum(sizes[slot] for slot in gone) >= wanted
    for count in range(len(gone)):
        for fewer in combinations(gone, count):
            assert sum(sizes[slot] for slot in fewer) < wanted


def test_of_equal_sizes_the_least_worth_gives_way() -> None:
    assert giving_way([Candidate(1, 10, 5.0), Candidate(2, 10, 1.0), Candidate(3, 10, 3.0)], 15) == (2, 3)


def test_one_small_load_does_not_empty_the_device() -> None:
    memory = device()
    for slot in range(1, 11):
        memory.add(slot, "e", 100, 0, {}, 0.0)
        memory.activate(slot)
        memory.arrived(slot)
    memory.add(11, "e", 10, 0, {}, 0.0)
    assert memory.giving_way(memory.lacking(11), range(1, 11), 0.0) == (1,)


def test_a_model_that_could_never_be_held_is_refused_and_nothing_changes() -> None:
    memory = device()
    memory.add(1, "a", 600, 0, {"pool": 300}, 0.0)
    with pytest.raises(TooLarge, match="device_memory_mb"):
        memory.add(2, "a", 701, 0, {"pool": 300}, 0.0)
    memory.add(3, "a", 700, 0, {"pool": 300}, 0.0)
    with pytest.raises(TooLarge):  # model 3 could never come in any more
        memory.add(4, "b", 10, 0, {"other": 1}, 0.0)
    assert sorted(memory.slots) == [1, 3]


def test_the_pool_of_a_model_that_was_unloaded_still_counts() -> None:
    memory = device()
    memory.add(1, "a", 100, 0, {"pool": 500}, 0.0)
    memory.activate(1)
    memory.remove(1)
    with pytest.raises(TooLarge):
        memory.add(2, "a", 510, 0, {}, 0.0)
    memory.drop_group("a")
    memory.add(2, "a", 510, 0, {}, 0.0)


def test_double_activation_is_refused() -> None:
    memory = device()
    memory.add(1, "e", 100, 0, {}, 0.0)
    pages = memory.activate(1)
    with pytest.raises(ValueError, match="active already"):
        memory.activate(1)
    assert memory.slots[1].pages == pages
    assert memory.pool.free == 90


def test_pools_and_weights_that_stay_are_booked_once_and_go_with_their_engine() -> None:
    memory = device()
    memory.add(1, "a", 100, 0, {"pool": 200}, 0.0)
    memory.add(2, "a", 100, 30, {"pool": 200}, 0.0)
    memory.activate(1)
    memory.activate(2)
    assert memory.ledger.balance().kv == 200
    assert memory.ledger.balance().weights == 230
    memory.remove(1)
    assert memory.ledger.balance().kv == 200
    memory.drop_group("a")
    assert memory.ledger.balance().free == TOTAL


def test_images_above_the_hosts_memory_go_to_the_disk_the_least_likely_first() -> None:
    memory = device(host=250)
    for slot in (1, 2, 3):
        memory.add(slot, "e", 100, 0, {}, 0.0)
    memory.slots[1].likelihood.used(0.0)
    memory.slots[3].likelihood.used(0.0)
    assert memory.moves(0.0) == [(2, "disk")]
    assert memory.moves(0.0) == []
    memory.moved(2, "disk")
    assert memory.host_used == 200


def test_what_is_likely_comes_from_the_disk_before_it_is_asked_for() -> None:
    memory = device(host=250)
    for slot in (1, 2, 3):
        memory.add(slot, "e", 100, 0, {}, 0.0)
    [(gone, _)] = memory.moves(0.0)
    memory.moved(gone, "disk")
    assert memory.moves(1.0) == []
    memory.slots[gone].likelihood.used(2.0)
    moves = memory.moves(2.0)
    assert (gone, "host") in moves
    assert [to for _, to in moves].count("disk") == 1


class Twin(RuleBasedStateMachine):
    """The mapper against sums that are made anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = DeviceMemory(TOTAL, PAGE, 500)
        self.at_ms = 0.0
        self.model: dict[int, tuple[str, int, int, dict[str, int]]] = {}
        self.on: set[int] = set()
        self.ever: dict[str, set[str]] = {}
        """Groups -> pools booked. A group is there once one of its models was on the device."""
        self.fixed: set[int] = set()
        self.next = 1

    @rule(
        group=st.sampled_from("ab"),
        image=st.integers(0, 400),
        fixed=st.integers(0, 50),
        kv=st.dictionaries(st.sampled_from("xy"), st.just(100), max_size=2),
    )
    def add(self, group: str, image: int, fixed: int, kv: dict[str, int]) -> None:
        self.at_ms += 1.0
        try:
            self.memory.add(self.next, group, image, fixed, kv, self.at_ms)
        except TooLarge:
            return
        self.model[self.next] = (group, image, fixed, kv)
        self.next += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def activate(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        if self.memory.slots[slot].place != "out":
            with pytest.raises(ValueError, match="active already"):
                self.memory.activate(slot)
            return
        gone = self.memory.giving_way(self.memory.lacking(slot), sorted(self.on), self.at_ms)
        if gone is None:
            with pytest.raises(ValueError, match="more than are free"):
                self.memory.activate(slot)
            return
        for leaver in gone:
            self.memory.evict(leaver)
            self.on.discard(leaver)
        pages = self.memory.activate(slot)
        group, image, fixed, kv = self.model[slot]
        assert len(pages) == -(-image // PAGE)
        self.ever.setdefault(group, set()).update(kv)
        self.fixed |= {slot} if fixed else set()
        self.memory.arrived(slot)
        if image:
            self.on.add(slot)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def use_and_move(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.memory.slots[slot].likelihood.used(self.at_ms)
        for move in self.memory.moves(self.at_ms):
            self.memory.moved(*move)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model)))
        self.memory.remove(slot)
        self._forget(slot)

    @rule(group=st.sampled_from("ab"))
    def die(self, group: str) -> None:
        self.memory.drop_group(group)
        for slot in [slot for slot, one in self.model.items() if one[0] == group]:
            self._forget(slot)
        self.ever.pop(group, None)

    def _forget(self, slot: int) -> None:
        del self.model[slot]
        self.on.discard(slot)
        self.fixed.discard(slot)

    @invariant()
    def adds_up(self) -> None:
        balance = self.memory.ledger.balance()
        assert balance.weights + balance.kv + balance.workspace + balance.free == balance.total == TOTAL
        assert min(balance.weights, balance.kv, balance.workspace, balance.free) >= 0
        images = sum(-(-self.model[slot][1] // PAGE) * PAGE for slot in self.on)
        assert balance.kv == 100 * sum(map(len, self.ever.values()))
        assert balance.weights == images + sum(self.model[slot][2] for slot in self.fixed)

    @invariant()
    def no_page_is_held_twice(self) -> None:
        held = [page for one in self.memory.slots.values() for page in one.pages]
        assert len(held) == len(set(held)) == self.memory.pool.count - self.memory.pool.free


TestTwin = Twin.TestCase
TestTwin.settings = settings(examples(60), stateful_step_count=40)
