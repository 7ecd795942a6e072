"""Who works off which partition of a model's topic.

    FREE --assign--> ASSIGNED --ask back--> RELEASING --released, owner fenced or left--> FREE
                        |
                        +--released unasked, owner fenced or left--> FREE
                        |
                        +--released and worked off, the model is deleted--> FREE, DRAINED

While a deleted model is worked off, workers are told `draining` instead of `assigned`: the same owner and epoch, but
to be released at the end of the partition. Nothing else differs, so the partition of a lost owner is assigned, to be
drained, to the next. A DRAINED partition stays free, unless the deletion is taken back.

This file is the only one that changes the owner of a partition, and `assign` demands a FREE one: that is the rule
"no path reassigns a partition without a release or a fence". A partition number is `lane * width + bucket`; all lanes
of a bucket go to one replica where possible, since a bucket is a set of sessions and their KV prefixes are warm there.

A partition is assigned to a worker on behalf of one replica there. When a new version takes over on the same worker the
partition is handed over all the same: the release says that what the old version had in work is committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct


class ReplicaKey(NamedTuple):
    """One replica: a worker incarnation, and the placement epoch at which it was placed there."""

    worker: str
    incarnation: str
    placement_epoch: int


class PartitionState(Struct):
    """One partition of a work topic. Free partitions have no owner; `epoch` stays at that of the last assignment."""

    partition: int
    state: Literal["free", "assigned", "releasing"] = "free"
    owner: ReplicaKey | None = None
    epoch: int = -1
    """sie.cluster offset of the record that caused the assignment; only grows."""
    freed_by: int = -1
    """Offset of the record by which its newest owner is to lose it, or lost it: why it can be given away. -1: none."""
    drained: bool = False
    """Free for good: its model is deleted, and everything in it is worked off."""
    images_at: str = ""
    """Where its last owner keeps requests that ran, for the next one (see PartitionReleased); empty: nowhere."""


def assign(partition: PartitionState, owner: ReplicaKey, epoch: int) -> None:
    """FREE -> ASSIGNED. Anything else would give the partition two owners that can both commit."""
    assert partition.state == "free", f"partition is not free: {partition}"
    assert partition.owner is None, f"a free partition has no owner: {partition}"
    assert not partition.drained, f"nothing is left in a drained partition: {partition}"
    assert epoch > partition.epoch, f"epochs only grow: {epoch} after {partition}"
    assert owner.placement_epoch < epoch, f"a replica serves partitions assigned after it was placed: {owner}, {epoch}"
    partition.state = "assigned"
    partition.freed_by = -1
    partition.owner = owner
    partition.epoch = epoch


def ask_back(partition: PartitionState, offset: int = -1) -> None:
    """ASSIGNED -> RELEASING: the owner finishes what runs, commits, and reports PartitionReleased."""
    assert partition.state == "assigned", f"only an assigned partition is asked back: {partition}"
    partition.state = "releasing"
    partition.freed_by = offset


def released(partition: PartitionState, worker: str, incarnation: str, epoch: int, images_at: str = "") -> bool:
    """The owner let go of assignment `epoch`. False, and no change, when that is not the present assignment."""
    owner = partition.owner
    if owner is None or (owner.worker, owner.incarnation, partition.epoch) != (worker, incarnation, epoch):
        return False
    partition.state = "free"
    partition.owner = None
    partition.images_at = images_at
    return True


def owner_gone(partition: PartitionState, worker: str, incarnation: str, offset: int = -1) -> bool:
    """That incarnation can never commit again (fenced, or left). True when it was its own, and is free now."""
    owner = partition.owner
    if owner is None or (owner.worker, owner.incarnation) != (worker, incarnation):
        return False
    partition.state = "free"
    partition.owner = None
    partition.freed_by = offset
    partition.images_at = ""
    return True


def worked_off(partition: PartitionState) -> None:
    """FREE -> DRAINED: its last owner released it at its end, and nothing comes any more."""
    assert partition.state == "free", f"only what is released can be worked off: {partition}"
    partition.drained = True


def wanted_again(partition: PartitionState) -> None:
    """DRAINED -> FREE: the deletion was taken back. Anything else stays as it is."""
    partition.drained = False


class Moves(NamedTuple):
    """What to do now: give free partitions away, ask assigned ones back. Ascending by partition."""

    assign: tuple[tuple[PartitionState, ReplicaKey], ...]
    ask_back: tuple[PartitionState, ...]


def share_out(partitions: Sequence[PartitionState], width: int, serving: Sequence[ReplicaKey]) -> Moves:
    """Share the buckets among the `serving` replicas, moving as few as possible.

    Each serving replica gets floor or ceil of buckets/replicas. A bucket stays with its holder while that one serves
    and is not above its share; the others go to the replica with the fewest, in the order of `serving`. With nobody
    serving, assigned partitions are asked back and free ones stay free; drained ones always do. Pure: the caller
    applies the moves.
    """
    wanted = _wanted_owners(partitions, width, serving)
    give: list[tuple[PartitionState, ReplicaKey]] = []
    take: list[PartitionState] = []
    for partition in partitions:
        owner = wanted.get(partition.partition % width)
        if partition.state == "free":
            if owner is not None and not partition.drained:
                give.append((partition, owner))
        elif partition.state == "assigned" and partition.owner != owner:
            take.append(partition)
    return Moves(tuple(give), tuple(take))


def _wanted_owners(
    partitions: Sequence[PartitionState], width: int, serving: Sequence[ReplicaKey]
) -> Mapping[int, ReplicaKey]:
    """{bucket: the replica that should hold all its lanes}; empty when nobody serves."""
    if not serving:
        return {}
    held: dict[ReplicaKey, list[int]] = {replica: [] for replica in serving}
    homeless: list[int] = []
    for bucket in range(width):
        holder = _holder(partitions, width, bucket, held)
        if holder is None:
            homeless.append(bucket)
        else:
            held[holder].append(bucket)
    low, extra = divmod(width, len(serving))
    # The replicas that hold most may keep one more than the others: fewest moves.
    by_size = sorted(serving, key=lambda replica: -len(held[replica]))
    share = {replica: low + 1 if place < extra else low for place, replica in enumerate(by_size)}
    for replica in serving:
        homeless.extend(held[replica][share[replica] :])
        del held[replica][share[replica] :]
    for bucket in sorted(homeless):
        emptiest = min(serving, key=lambda replica: len(held[replica]) - share[replica])
        held[emptiest].append(bucket)
    return {bucket: replica for replica in serving for bucket in held[replica]}


def _holder(
    partitions: Sequence[PartitionState], width: int, bucket: int, serving: Mapping[ReplicaKey, object]
) -> ReplicaKey | None:
    """The serving replica that holds the first assigned lane of the bucket."""
    for number in range(bucket, len(partitions), width):
        partition = partitions[number]
        if partition.state == "assigned" and partition.owner in serving:
            return partition.owner
    return None
