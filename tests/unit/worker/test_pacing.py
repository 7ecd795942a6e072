"""When commits start."""

from __future__ import annotations

import pytest

from gpu_worker.pacing import BEHIND_FOR_MS, BEHIND_INTERVAL_MS, CommitPacer
from sie_stream.ports import TRANSACTION_REST_MS


def pacer() -> CommitPacer:
    return CommitPacer(5.0, 50.0, commit_ms=4.0)


def test_nothing_pending_nothing_due() -> None:
    assert pacer().due_in_ms(100.0, 0, None) is None


def test_a_first_result_is_committed_at_once() -> None:
    one = pacer()
    one.pending(100.0)
    assert one.due_in_ms(100.0, 1, None) == 0.0


def test_the_interval_counts_from_the_start_of_the_last_commit() -> None:
    one = pacer()
    one.started(100.0)
    one.pending(101.0)
    assert one.due_in_ms(101.0, 1, None) == pytest.approx(4.0)


def test_groups_grow_with_what_waits() -> None:
    one = pacer()
    assert one.interval_ms(1) == 5.0
    assert one.interval_ms(64) == pytest.approx(12.0)
    assert one.interval_ms(10_000) == pytest.approx(32.0)
    one.commit_ms = 20.0
    assert one.interval_ms(10_000) == 50.0


def test_a_batch_about_to_finish_is_waited_for_but_not_for_long() -> None:
    one = pacer()
    one.pending(100.0)
    assert one.due_in_ms(100.0, 1, 1.0) == pytest.approx(2.0)
    assert one.due_in_ms(102.0, 1, 1.0) == 0.0
    assert one.due_in_ms(100.0, 1, 30.0) == 0.0


def test_after_an_abort_there_is_a_pause() -> None:
    one = pacer()
    one.started(100.0)
    one.aborted(110.0)
    due = one.due_in_ms(110.0, 1, None)
    assert due is not None
    assert due >= 100.0


def test_the_measured_duration_feeds_the_interval() -> None:
    one = pacer()
    for _ in range(50):
        one.succeeded(100.0, 30.0)
    assert one.interval_ms(1) == pytest.approx(30.0, abs=1.5)


def test_a_worker_behind_its_topics_commits_rarely_and_only_then() -> None:
    one = pacer()
    one.started(1_000.0)
    one.fell_behind(1_000.0)
    one.pending(1_001.0)
    assert one.due_in_ms(1_010.0, 5_000, None) == pytest.approx(1_000.0 + BEHIND_INTERVAL_MS - 1_010.0)
    assert one.due_in_ms(1_000.0 + BEHIND_FOR_MS, 5_000, None) == 0.0


def test_after_a_commit_there_is_a_rest_for_its_markers() -> None:
    one = pacer()
    one.started(100.0)
    one.succeeded(120.0, 20.0)
    one.pending(120.0)
    assert one.due_in_ms(120.0, 1, None) == TRANSACTION_REST_MS
    assert one.due_in_ms(120.0 + TRANSACTION_REST_MS, 1, None) == 0.0
