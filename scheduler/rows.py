"""The state as rows of the public tables: sie.models, sie.instances, sie.routes, sie.placements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, assert_never

from msgspec import Struct, structs

from scheduler.limits import RETRIES_MAX
from scheduler.state import ClusterState, ModelState
from sie_stream.control import (
    InstanceRow,
    ModelLaunch,
    ModelRow,
    PartitionPlacement,
    PlacementRow,
    ReplicaPlacement,
    ReplicaRow,
    RouteRow,
)
from sie_stream.ids import base_of, instance_id, variant_of
from sie_stream.rollout_records import STABLE

MESSAGE_CHARS_MAX = 2_000

ROW_TYPES: dict[str, type[Struct]] = {
    "models": ModelRow,
    "instances": InstanceRow,
    "routes": RouteRow,
    "placements": PlacementRow,
}


def row_name(table: Literal["models", "instances", "routes", "placements"], model: str) -> str:
    """Key of the row: the instance id in the table of instances, the model name elsewhere."""
    return instance_id(model) if table == "instances" else model


def build_row(
    state: ClusterState, table: Literal["models", "instances", "routes", "placements"], name: str
) -> Struct | None:
    """The row of model `name`, or None when it has none (any more)."""
    model = state.models.get(name)
    if model is None:
        return None
    match table:
        case "models":
            return model_row(model)
        case "instances":
            return instance_row(state, model)
        case "routes":
            return model.published_route
        case "placements":
            return placement_row(model)
        case _:
            assert_never(table)


def model_row(model: ModelState) -> ModelRow:
    return ModelRow(
        model=model.model,
        version=model.version,
        generation=model.generation,
        spec=model.spec,
        status=model.status,
        applied_at_ms=model.applied_ms,
        not_enforced=model.not_enforced,
    )


def instance_row(state: ClusterState, model: ModelState) -> InstanceRow:
    """Status and message are those of the model itself; replicas of other variants are listed after its own."""
    replicas = [*_replicas(model, STABLE)]
    if model.model in state.rolling:
        for name, unit in state.models.items():
            if name != model.model and base_of(name) == model.model:
                replicas += _replicas(unit, variant_of(name))
    return InstanceRow(
        instance=model.instance,
        model=model.model,
        version=model.version,
        status=instance_status(model),
        replicas=tuple(replicas),
        message=model.message[:MESSAGE_CHARS_MAX],
        timings_ms=dict(model.timings_ms),
        generation=model.generation,
        applied_offset=model.applied_offset,
        given_up=model.failures > RETRIES_MAX,
        replicas_wanted=model.replicas_wanted,
    )


def _replicas(model: ModelState, variant: str) -> Iterator[ReplicaRow]:
    for replica in model.replicas:
        yield ReplicaRow(
            worker=replica.worker,
            incarnation=replica.incarnation,
            device=replica.device,
            version=model.launches[replica.generation].version,
            state="loading" if replica.awaited else replica.state,
            placement_epoch=replica.placement_epoch,
            memory_bytes=replica.memory_bytes,
            message="" if replica.down is None else f"loaded again, its engine ended: {replica.down.cause}",
            devices=replica.spans,
            variant=variant,
            generation=replica.generation,
        )


def instance_status(model: ModelState) -> Literal["pending", "loading", "ready", "degraded", "asleep", "deleting"]:
    """ready: answers, with all replicas there or on their way. degraded: replicas are missing and it has given up, or
    waits for room. loading, pending: answers nothing yet. asleep: nothing to do; the next request gets it a replica.
    """
    if model.status == "deleting":
        return "deleting"
    if model.failures > RETRIES_MAX:
        return "degraded"
    if not model.replicas_wanted:
        return "asleep"
    ready = sum(replica.state == "ready" and not replica.awaited for replica in model.replicas)
    loading = sum(replica.awaited for replica in model.present())
    if ready == 0:
        return "loading" if loading else "pending"
    on_their_way = loading > 0 and not model.unplaced  # those that load do not stand for those that have no place
    return "ready" if len(model.present()) >= model.replicas_wanted or on_their_way else "degraded"


def _in_precision(launch: ModelLaunch, precision: str) -> ModelLaunch:
    return launch if launch.precision == precision else structs.replace(launch, precision=precision)


def placement_row(model: ModelState) -> PlacementRow:
    replicas = tuple(
        ReplicaPlacement(
            worker=replica.worker,
            incarnation=replica.incarnation,
            device=replica.device,
            placement_epoch=replica.placement_epoch,
            launch=_in_precision(model.launches[replica.generation], replica.precision),
            devices=replica.spans,
        )
        for replica in model.replicas
    )
    partitions = tuple(
        PartitionPlacement(
            partition=partition.partition,
            worker=partition.owner.worker,
            incarnation=partition.owner.incarnation,
            placement_epoch=partition.epoch,
            state="draining" if partition.state == "assigned" and model.working_off else partition.state,
            images_at=partition.images_at,
        )
        for partition in model.partitions
        if partition.owner is not None and partition.state != "free"
    )
    return PlacementRow(model=model.model, topic=model.route.topic, replicas=replicas, partitions=partitions)


def published(route: RouteRow, epoch: int, width: int) -> RouteRow:
    """The route of a generation as ingress gets it."""
    return structs.replace(route, route_epoch=epoch, width=width)
