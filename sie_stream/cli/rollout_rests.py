"""What waits in the topics of variants that have no replica to answer it: how much, why, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from scheduler.counts import counted
from scheduler.rollout_rests import may_owe
from scheduler.state import ClusterState, ModelState
from scheduler.variants import units_of
from sie_stream.cli.queued import queued
from sie_stream.edge.connection import Connection
from sie_stream.ids import variant_of

REST = "rest"
"""Phase of the row of what waits."""


def counted_rests(connection: Connection, state: ClusterState, model: str = "") -> list[dict[str, Any]]:
    """`rest_rows`, counted in Kafka; connects only when something may wait."""

    def count(topic: str) -> int | None:
        reader = connection.reader(connection.settings.topics.worker_group)
        try:
            return queued(reader, topic)
        finally:
            reader.close()

    return list(rest_rows(state, count, model))


def rest_rows(state: ClusterState, count: Callable[[str], int | None], model: str = "") -> Iterator[dict[str, Any]]:
    """A row for each variant in whose topic requests wait, with the columns of those of rollouts under way.

    `count`: requests in a topic that no worker has answered; None: nobody could count them in time.
    """
    for name, found in sorted(state.models.items()):
        if model not in ("", name):
            continue
        for unit in units_of(state, name):
            if not _may_hold(found, unit):
                continue
            waiting = count(unit.route.topic)
            if waiting != 0:
                yield _row(found, unit, waiting)


def _may_hold(model: ModelState, unit: ModelState) -> bool:
    """Nothing answers what is in its topic, and something may be in it."""
    answers = any(replica.state == "ready" and not replica.awaited for replica in unit.replicas)
    owes = may_owe(unit, model.rollouts.get(variant_of(unit.model)))
    return owes and not answers and any(not partition.drained for partition in unit.partitions)


def _row(model: ModelState, unit: ModelState, waiting: int | None) -> dict[str, Any]:
    return {
        "model": model.model,
        "rollout": "",
        "variant": variant_of(unit.model),
        "version": unit.version,
        "phase": REST,
        "step": "-",
        "share": "0 %",
        "replicas": f"0/{unit.replicas_wanted}",
        "note": _in_words(model, unit, waiting),
        "topic": unit.route.topic,
        "queued": waiting,
        "steps": [],
        "gates": [],
        "gate_results": [],
    }


def _got_copies_alone(model: ModelState, unit: ModelState) -> bool:
    """It was a shadow each time that is known of."""
    known = [*model.rollout_history, *model.rollouts.values()]
    steps = [one.step for one in known if one.variant == variant_of(unit.model)]
    return bool(steps) and max(steps) < 0


def _in_words(model: ModelState, unit: ModelState, waiting: int | None) -> str:
    one, many = ("copy waits", "copies wait") if _got_copies_alone(model, unit) else ("request waits", "requests wait")
    requests = f"not yet counted {many}" if waiting is None else counted(waiting, one, many)
    start = f"{requests} in {unit.route.topic}"
    if unit.replicas:
        return f"{start}: worked off when the replica of {unit.version} on {unit.replicas[0].worker} has loaded."
    why = unit.message or "it has no replica"
    abort = ""
    if unit.status == "accepted":
        abort = (
            f" `sie-stream rollout abort {model.model} --variant {variant_of(unit.model)}` lets {model.version} answer "
            "them, where that has a place."
        )
    return (
        f"{start} for a replica of {unit.version}: {why.removesuffix('.')}. Add a worker, or free memory: they are "
        f"answered then.{abort}"
    )
