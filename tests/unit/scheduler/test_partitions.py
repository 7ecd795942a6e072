"""Partition ownership: legal moves only, even shares, and as few moves as possible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.partitions import (
    PartitionState,
    ReplicaKey,
    ask_back,
    assign,
    owner_gone,
    released,
    share_out,
    wanted_again,
    worked_off,
)

LANES = 3
A, B, C = (ReplicaKey(worker, f"{worker}-1", 1) for worker in ("a", "b", "c"))


def topic(width: int) -> list[PartitionState]:
    return [PartitionState(number) for number in range(LANES * width)]


def owned(width: int, *owners: ReplicaKey | None) -> list[PartitionState]:
    """A topic whose bucket n is held by owners[n], in all lanes."""
    partitions = topic(width)
    for partition in partitions:
        owner = owners[partition.partition % width]
        if owner is not None:
            assign(partition, owner, epoch=10)
    return partitions


def test_an_assigned_partition_is_never_assigned_again() -> None:
    partition = PartitionState(0)
    assign(partition, A, epoch=10)
    with pytest.raises(AssertionError, match="not free"):
        assign(partition, B, epoch=11)
    ask_back(partition)
    with pytest.raises(AssertionError, match="not free"):
        assign(partition, B, epoch=11)


def test_a_release_must_name_the_present_assignment() -> None:
    partition = PartitionState(0)
    assign(partition, A, epoch=10)
    assert not released(partition, "a", "a-0", 10), "another incarnation"
    assert not released(partition, "a", "a-1", 9), "an older assignment"
    assert not released(partition, "b", "b-1", 10), "another worker"
    assert partition.owner == A
    assert released(partition, "a", "a-1", 10)
    assert not released(partition, "a", "a-1", 10), "the same release twice"
    with pytest.raises(AssertionError, match="epochs only grow"):
        assign(partition, B, epoch=10)


def test_where_images_are_goes_from_one_owner_to_the_next_and_no_further() -> None:
    partition = PartitionState(0)
    assign(partition, A, epoch=10)
    assert not released(partition, "a", "a-0", 10, "elsewhere:1#x")
    assert partition.images_at == ""
    assert released(partition, "a", "a-1", 10, "here:1#x")
    assign(partition, B, epoch=11)
    assert partition.images_at == "here:1#x"
    assert released(partition, "b", "b-1", 11)
    assert partition.images_at == ""
    assign(partition, A, epoch=12)
    assert released(partition, "a", "a-1", 12, "here:2#x")
    assign(partition, B, epoch=13)
    assert owner_gone(partition, "b", "b-1")
    assert partition.images_at == "", "it may have written on since"


def test_a_drained_partition_is_given_to_nobody_until_it_is_wanted_again() -> None:
    partitions = owned(2, A, None)
    first = partitions[0]
    with pytest.raises(AssertionError, match="only what is released"):
        worked_off(first)
    released(first, "a", "a-1", 10)
    worked_off(first)
    with pytest.raises(AssertionError, match="nothing is left"):
        assign(first, A, epoch=11)
    assert first not in [partition for partition, _ in share_out(partitions, 2, [A]).assign]
    wanted_again(first)
    assert first in [partition for partition, _ in share_out(partitions, 2, [A]).assign]


def test_a_gone_owner_frees_only_its_own() -> None:
    partition = PartitionState(0)
    assign(partition, A, epoch=10)
    assert not owner_gone(partition, "a", "a-2")
    assert owner_gone(partition, "a", "a-1")
    assert partition.state == "free"


def test_all_lanes_of_a_bucket_go_to_one_replica() -> None:
    moves = share_out(topic(4), 4, [A, B])
    by_bucket: dict[int, set[ReplicaKey]] = {}
    for partition, owner in moves.assign:
        by_bucket.setdefault(partition.partition % 4, set()).add(owner)
    assert len(moves.assign) == 12
    assert all(len(owners) == 1 for owners in by_bucket.values())
    assert sorted(owner.worker for owners in by_bucket.values() for owner in owners) == ["a", "a", "b", "b"]


def test_a_new_replica_takes_only_its_share() -> None:
    moves = share_out(owned(4, A, A, A, A), 4, [A, B])
    assert moves.assign == ()
    assert len({partition.partition % 4 for partition in moves.ask_back}) == 2


def test_nothing_moves_when_the_shares_are_even() -> None:
    assert share_out(owned(4, A, B, B, A), 4, [A, B]) == ((), ())
    assert share_out(owned(3, A, B, B), 3, [A, B]) == ((), ()), "one more is within the share of the larger holder"


def test_buckets_of_a_gone_owner_go_to_those_with_fewest() -> None:
    moves = share_out(owned(4, A, A, B, None), 4, [A, B])
    assert moves.ask_back == ()
    assert {owner for _, owner in moves.assign} == {B}


def test_with_nobody_serving_everything_is_asked_back() -> None:
    moves = share_out(owned(2, A, None), 2, [])
    assert moves.assign == ()
    assert [partition.partition for partition in moves.ask_back] == [0, 2, 4]


def test_lanes_follow_the_lane_that_already_moved() -> None:
    partitions = owned(1, A)
    for partition in partitions:
        ask_back(partition)
    assert released(partitions[0], "a", "a-1", 10)
    moves = share_out(partitions, 1, [B, C])
    assert [(partition.partition, owner) for partition, owner in moves.assign] == [(0, B)]
    assign(partitions[0], B, epoch=11)
    assert released(partitions[1], "a", "a-1", 10)
    assert [owner for _, owner in share_out(partitions, 1, [C, B]).assign] == [B]


replicas = st.lists(st.sampled_from([A, B, C]), unique=True, max_size=3)


@given(
    width=st.integers(1, 9),
    owners=st.lists(st.sampled_from([None, A, B, C]), min_size=9, max_size=9),
    serving=replicas,
)
def test_shares_end_even_and_moves_are_the_fewest(
    width: int, owners: list[ReplicaKey | None], serving: list[ReplicaKey]
) -> None:
    partitions = owned(width, *owners[:width])
    held = {replica: sum(owner == replica for owner in owners[:width]) for replica in serving}
    moves = share_out(partitions, width, serving)
    moved = {partition.partition % width for partition in moves.ask_back}
    for epoch in range(11, 13):
        for partition in share_out(partitions, width, serving).ask_back:
            owner = partition.owner
            assert owner is not None
            ask_back(partition)
            assert released(partition, owner.worker, owner.incarnation, partition.epoch)
        for partition, owner in share_out(partitions, width, serving).assign:
            assign(partition, owner, epoch)
    assert share_out(partitions, width, serving) == ((), ()), "settled after one round"
    if not serving:
        assert all(partition.state == "free" for partition in partitions)
        return
    counts = sorted(sum(partition.owner == replica for partition in partitions) for replica in serving)
    assert counts[-1] - counts[0] <= LANES, counts
    low, extra = divmod(width, len(serving))
    kept = sorted(held.values(), reverse=True)
    unavoidable = sum(max(0, n - (low + (place < extra))) for place, n in enumerate(kept))
    homeless = sum(owner is not None and owner not in serving for owner in owners[:width])
    assert len(moved) == unavoidable + homeless
