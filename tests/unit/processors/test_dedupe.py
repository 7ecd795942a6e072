"""The dedupe window against a slow, obvious twin."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sie_stream.dedupe import SLICES, DedupeWindow, digest_of

WINDOW_MS = 3_200
SLICE_MS = WINDOW_MS // SLICES
START_MS = 1_700_000_000_000


class SlowWindow:
    """Remembers everything, and looks at all of it. An id lives from its first sighting; times are whole slices."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        self.newest = 0

    def seen(self, request_id: str, at_ms: int) -> bool:
        number = at_ms // SLICE_MS
        self.newest = max(self.newest, number)
        self.first = {key: one for key, one in self.first.items() if one >= self.newest - SLICES}
        if request_id in self.first:
            return True
        if number >= self.newest - SLICES:
            self.first[request_id] = number
        return False


STEP = st.one_of(
    st.tuples(st.just("seen"), st.sampled_from("abcdef"), st.integers(-WINDOW_MS, 2 * WINDOW_MS)),
    st.tuples(st.just("forget"), st.sampled_from("abcdef"), st.just(0)),
)


@given(st.lists(STEP, max_size=60))
def test_it_agrees_with_the_slow_twin(steps: list[tuple[str, str, int]]) -> None:
    window, twin = DedupeWindow(WINDOW_MS, 1_000), SlowWindow()
    now_ms = START_MS
    for what, request_id, moved_ms in steps:
        if what == "forget":
            window.forget([request_id])
            twin.first.pop(request_id, None)
            continue
        at_ms = now_ms + moved_ms // 4
        now_ms = max(now_ms, at_ms)
        assert window.seen(request_id, at_ms) == twin.seen(request_id, at_ms)
        assert len(window) == len(twin.first)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3 * WINDOW_MS)), max_size=40))
def test_remembering_many_is_as_seeing_one_by_one(entries: list[tuple[str, int]]) -> None:
    at_once, singly = DedupeWindow(WINDOW_MS, 1_000), DedupeWindow(WINDOW_MS, 1_000)
    timed = [(request_id, START_MS + moved_ms) for request_id, moved_ms in entries]
    at_once.remember(timed)
    for request_id, at_ms in timed:
        singly.seen(request_id, at_ms)
    end_ms = START_MS + 3 * WINDOW_MS
    assert [at_once.seen(one, end_ms) for one in "abcdef"] == [singly.seen(one, end_ms) for one in "abcdef"]


def test_the_cap_drops_the_oldest_first() -> None:
    window = DedupeWindow(WINDOW_MS, 10)
    for number in range(30):
        assert not window.seen(f"r{number}", START_MS + number * SLICE_MS)
        assert len(window) <= 10
    assert window.seen("r29", START_MS + 30 * SLICE_MS)
    assert not window.seen("r0", START_MS + 30 * SLICE_MS)
    assert window.evicted_early >= 20


def test_a_window_of_zero_remembers_nothing() -> None:
    window = DedupeWindow(0, 1_000)
    assert [window.seen("a", START_MS) for _ in range(3)] == [False, False, False]


def test_an_id_seen_again_after_being_forgotten_lives_its_full_time() -> None:
    window = DedupeWindow(WINDOW_MS, 1_000)
    window.seen("a", START_MS)
    window.forget(["a"])
    window.seen("a", START_MS + WINDOW_MS // 2)
    assert window.seen("a", START_MS + WINDOW_MS + WINDOW_MS // 4)


def test_digests_are_the_same_everywhere() -> None:
    assert digest_of("req-1").hex() == "044754de574a870b"
