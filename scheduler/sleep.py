"""Models that may have no replica: how they fall asleep, and what wakes them.

    AWAKE --idle, all its replicas ready, no older version--> ASLEEP --WorkWaiting, applied again, deleted--> AWAKE

Asleep is what the route says (`RouteRow.asleep`) and nothing else: `replicas_wanted` is 0, the workers release the
partitions and unload. Requests go on to the topic. Nobody here can see them, so every ingress reads the topics of
sleeping models from where the workers stopped, and says WorkWaiting, again and again, as long as there is something and
the route says asleep. Where the workers stopped is what they committed, so it does not matter when a request was
routed, by whom, or who died since: what is not done is found by whoever looks next.
"""

from __future__ import annotations

from msgspec import structs

from scheduler.state import ModelState
from scheduler.step import Step


def want_replicas(step: Step, model: ModelState, wanted: int) -> None:
    """Set the number of replicas. The route says when there are none, and when there are some again."""
    if not wanted:
        # Its weights may still be in the page cache there, so it will be back sooner.
        model.lost_workers = tuple(dict.fromkeys(replica.worker for replica in model.present()))
    model.replicas_wanted = wanted
    route = model.published_route
    if route is not None and route.asleep != (wanted == 0):
        model.published_route = structs.replace(route, route_epoch=step.offset, asleep=wanted == 0)
        step.touch("routes", model.model)
    step.touch("instances", model.model)
    step.look_at(model)


def sleeps(model: ModelState, route_epoch: int) -> bool:
    """Whether it is asleep by the route of this epoch."""
    route = model.published_route
    return route is not None and route.asleep and route.route_epoch == route_epoch and not model.replicas_wanted
