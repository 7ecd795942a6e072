"""Running requests move with their partition: stopped and kept as images here, fetched and gone on with by its next
owner.

Of a partition that is to be given back, requests of movable models are not waited for, if the placement names another
replica of the very same launch that can go on with them. Their offsets stay unfinished, like those of requests that
never started, so exactly-once is as it was: whoever has no image computes from the beginning.

What does not fit into `sequence_images_mb` runs to its end, and so does everything while this worker stops (the images
would end with it) and where fields are protected (an image holds them in plain form).
"""

from __future__ import annotations

from typing import assert_never

from gpu_worker.engine_port import EngineKey, SequenceAdopted, SequenceExported
from gpu_worker.facts import DropImages, ExportSequences, FetchImages, KeepImage
from gpu_worker.replicas import engine_of
from gpu_worker.retries import abandon
from gpu_worker.sequence_images import ImagesFetched, ImagesTaken, Run, SequenceImage
from gpu_worker.state import Batch, Engine, Fetched, Item, Kept, Partition
from gpu_worker.touched import moved_on, taken_up
from gpu_worker.worker_state import WorkerState
from sie_stream.control import PlacementRow
from sie_stream.ids import TopicPartition

MIB = 1024 * 1024
KEPT_MS = 60_000.0
"""Images that nobody fetched, or that no request was found for, are dropped after this time."""
FETCH_MS_MAX = 4_000.0
"""A partition starts without its images after this time."""


def bytes_max(state: WorkerState) -> int:
    """Of images kept for others, and again of images fetched; 0: requests are not moved."""
    return state.settings.sequence_images_mb * MIB


def take(state: WorkerState, event: SequenceExported | SequenceAdopted | ImagesFetched | ImagesTaken) -> None:
    match event:
        case SequenceExported():
            _on_exported(state, engine_of(state, event.engine), event)
        case SequenceAdopted():
            _on_adopted(state, engine_of(state, event.engine), event)
        case ImagesFetched():
            _on_fetched(state, event)
        case ImagesTaken():
            state.handover.kept.pop(event.partition, None)
        case _:
            assert_never(event)


# ---------------------------------------------------------------- the owner that gives back


def want_exports(state: WorkerState, model: str, row: PlacementRow | None) -> None:
    """Stop what runs for partitions of `model` that are being given back, where another replica can go on with it."""
    if not state.identity.images_at or row is None:
        return
    for engine in state.engines.values():
        for batch in engine.outstanding.values():
            if batch.export == "" and _moves(state, batch, model, row):
                batch.export = "wanted"
                state.handover.wanted = True


def _moves(state: WorkerState, batch: Batch, model: str, row: PlacementRow) -> bool:
    partition = batch.items[0].partition
    if not batch.replica.movable or partition.model != model or partition.state != "releasing":
        return False
    if batch.finisher.guard is not None:
        return False
    here = (state.identity.worker, state.identity.incarnation, batch.replica.key.placement_epoch)
    others = [one for one in row.replicas if (one.worker, one.incarnation, one.placement_epoch) != here]
    return any(one.launch == batch.replica.launch for one in others)


def order_exports(state: WorkerState) -> None:
    """Ask the engines, once no earlier order is open: only then is known how much room there is."""
    if not state.handover.wanted:
        return
    batches = [(engine.key, batch) for engine in state.engines.values() for batch in engine.outstanding.values()]
    if any(batch.export == "asked" for _, batch in batches):
        return
    state.handover.wanted = False
    by_engine: dict[EngineKey, list[int]] = {}
    for key, batch in batches:
        if batch.export == "wanted":
            batch.export, batch.stopped_ms = "asked", state.now_ms
            by_engine.setdefault(key, []).append(batch.batch_id)
    room = bytes_max(state) - sum(one.size for one in state.handover.kept.values())
    for key, batch_ids in by_engine.items():
        state.commands.append(ExportSequences(key, tuple(batch_ids), max(0, room) // len(by_engine)))


def _on_exported(state: WorkerState, engine: Engine, event: SequenceExported) -> None:
    """The engine has let go of a request, or (no image) has not: then it runs to its end there, or has ended."""
    if event.image is None:
        staying = engine.outstanding.get(event.batch_id)
        if staying is not None:
            staying.export = "stays"
        return
    batch = engine.let_go(event.batch_id)
    if batch is None:
        return  # of an engine that was given up since
    engine.finished_at = state.at_ms
    (item,) = batch.items
    if item.partition.state == "closed":
        return  # another worker has begun it again
    item.partition.running -= 1
    abandon(state, item)
    run = item.told_as or Run(state.identity.worker, state.identity.incarnation, item.attempts)
    history = moved_on(state, batch, len(event.image))
    image = SequenceImage(item.offset, run, item.told, batch.stopped_ms, event.image, history)
    place = item.partition.partition
    kept = state.handover.kept.get(place)
    if kept is not None and kept.placement_epoch != item.partition.placement_epoch:
        _drop(state, place)
        kept = None
    if kept is None:
        kept = state.handover.kept[place] = Kept(item.partition.placement_epoch, state.at_ms)
    kept.at_ms = state.at_ms
    kept.size += len(event.image)
    state.commands.append(KeepImage(place, image))
    state.note("sequence_exported", **_fields(item), image_bytes=len(event.image))


def images_at(state: WorkerState, partition: Partition) -> str:
    """Where the next owner of the partition finds images; empty when there are none."""
    kept = state.handover.kept.get(partition.partition)
    return state.identity.images_at if kept and kept.placement_epoch == partition.placement_epoch else ""


def _drop(state: WorkerState, place: TopicPartition) -> None:
    del state.handover.kept[place]
    state.commands.append(DropImages(place))


# ---------------------------------------------------------------- the owner that takes up


def may_start(state: WorkerState, place: TopicPartition, epoch: int, address: str) -> bool:
    """Whether assignment `epoch` of the partition has the images it can have. Asks for them if nobody has yet."""
    if not address or not bytes_max(state):
        return True
    handover = state.handover
    fetched = handover.fetched.get(place)
    if fetched is not None and fetched.placement_epoch == epoch:
        return True
    asked = handover.fetching.get(place)
    if asked is None or asked[0] != epoch:
        _not_ordered(state, place)
        asked = handover.fetching[place] = (epoch, state.at_ms)
    if state.at_ms - asked[1] >= FETCH_MS_MAX:
        state.note("images_not_fetched", **place._asdict(), why=f"nothing came within {FETCH_MS_MAX:.0f} ms")
        _arrived(state, place, epoch, {})
        return True
    if handover.ordered is None:
        # One after the other: only then is known how much room the last ones left.
        room = bytes_max(state) - sum(one.size for one in handover.fetched.values())
        handover.ordered = (place, epoch)
        state.commands.append(FetchImages(place, epoch, address, max(0, room)))
    return False


def _on_fetched(state: WorkerState, event: ImagesFetched) -> None:
    place, epoch = event.partition, event.placement_epoch
    asked = state.handover.fetching.get(place)
    if asked is None or asked[0] != epoch:
        return  # too late, or for an assignment that is over
    if event.message:
        state.note("images_not_fetched", **place._asdict(), why=event.message)
    _arrived(state, place, epoch, {image.offset: image for image in event.images})


def _arrived(state: WorkerState, place: TopicPartition, epoch: int, images: dict[int, SequenceImage]) -> None:
    del state.handover.fetching[place]
    _not_ordered(state, place)
    state.handover.fetched[place] = Fetched(epoch, state.at_ms, images)


def _not_ordered(state: WorkerState, place: TopicPartition) -> None:
    """What was ordered for it, if anything, is not waited for any more."""
    if state.handover.ordered is not None and state.handover.ordered[0] == place:
        state.handover.ordered = None


def take_image(state: WorkerState, batch: Batch) -> bytes:
    """The image that this batch goes on from; empty: it is computed from its beginning."""
    item = batch.items[0]
    fetched = state.handover.fetched.get(item.partition.partition)
    if fetched is None or fetched.placement_epoch != item.partition.placement_epoch:
        return b""
    image = fetched.images.pop(item.offset, None)
    if image is None or not batch.replica.movable:
        return b""
    item.told_as, item.told = image.run, image.told
    item.touches = (*image.history, *item.touches)
    batch.stopped_ms = image.frozen_ms
    return image.content


def _on_adopted(state: WorkerState, engine: Engine, event: SequenceAdopted) -> None:
    batch = engine.outstanding.get(event.batch_id)
    if batch is None:
        return  # of an engine that was given up since
    item = batch.items[0]
    engine.finished_at = state.at_ms
    taken_up(item, state.now_ms, event.refused)
    if event.refused:
        item.told_as, item.told = None, 0
        state.note("sequence_image_refused", **_fields(item), why=event.refused)
        return
    pause_ms = state.now_ms - batch.stopped_ms
    # By two clocks: where ours is behind, how long it was is not known, and 0 would be a lie.
    told = {"pause_ms": pause_ms} if pause_ms >= 0 else {"clock_behind_ms": -pause_ms}
    state.note("sequence_resumed", **_fields(item), **told)


def forget_old(state: WorkerState) -> None:
    """Images that nobody came for, and those no request was found for."""
    for place, kept in list(state.handover.kept.items()):
        if state.at_ms - kept.at_ms >= KEPT_MS:
            _drop(state, place)
            state.note("images_dropped", **place._asdict(), image_bytes=kept.size)
    for place, fetched in list(state.handover.fetched.items()):
        if state.at_ms - fetched.at_ms >= KEPT_MS:
            del state.handover.fetched[place]
    for place, (epoch, _) in list(state.handover.fetching.items()):
        awaited = state.awaiting.get(place)
        if awaited is None or awaited.placement_epoch != epoch:
            del state.handover.fetching[place]
            _not_ordered(state, place)


def _fields(item: Item) -> dict[str, str | int]:
    return {"request_id": item.work.request_id, **item.partition.partition._asdict(), "offset": item.offset}
