"""A scenario: a workload, a fleet, and what goes wrong. A scenario and a seed are one world.

Scenarios are TOML files in tests/simulation/scenarios; every field has a default, and unknown fields are errors.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct, field

from sie_stream.errors import ConfigError, did_you_mean

Role = Literal["worker", "ingress", "egress", "scheduler", "outcomes"]
ROLES: tuple[Role, ...] = ("worker", "ingress", "egress", "scheduler", "outcomes")
Span = tuple[int, int]
"""Least and most milliseconds."""


class Workload(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests are spread at random over `over_ms`. Shares are chances per request."""

    requests: int = 100
    over_ms: int = 4_000
    waves: int = 1
    """The requests come in so many waves of `over_ms`, one every `wave_every_ms`, with nothing in between."""
    wave_every_ms: int = 0
    models: int = 3
    memory_mb: int = 300
    """Most memory of a model."""
    replicas: int = 3
    """Most replicas that a model asks for at least."""
    sleepy: float = 0.0
    """Share of the models that may have none when they are idle."""
    bursts: float = 0.6
    """Part that comes in bursts, so that batches fill and finish out of order."""
    keys: int = 12
    """Different request keys; some requests have none."""
    duplicates: float = 0.08
    """Sent a second time, up to two seconds later."""
    malformed: float = 0.04
    unknown_model: float = 0.03
    bad_inputs: float = 0.03
    anonymous: float = 0.1
    """Without a request id."""
    deadline: float = 0.08
    """With a deadline that may pass."""
    avro: float = 0.3
    bound: float = 0.08
    """Sent to a topic of the user's own that the first model is bound to."""
    kills_engine: float = 0.0
    hangs_engine: float = 0.0
    raises_in_engine: float = 0.0
    refused_by_engine: float = 0.02
    streams: float = 0.0
    """Asking for token deltas."""
    rollout_hold_ms: int = 0
    """New versions take over by steps, each held so long; 0: all at once."""
    shadow_versions: int = 0
    """Every so-manieth version of a model gets copies before it answers anybody; 0: none."""
    broken_versions: int = 0
    """Every so-manieth version of a model refuses whatever it is asked; 0: none."""


class Fleet(Struct, frozen=True, forbid_unknown_fields=True):
    workers: int = 3
    memory_mb: int = 1_000
    """Of each device; a replica takes 100 to workload.memory_mb."""
    devices: int = 1
    """Of each worker."""
    ingress: int = 2
    egress: int = 1
    schedulers: int = 1
    """The second and later ones stand by."""
    outcomes: int = 0
    """Who reports windows of statistics; rollouts need one."""


class Engine(Struct, frozen=True, forbid_unknown_fields=True):
    """Batches take a random time, now and then a long one."""

    batch_ms: Span = (1, 30)
    slow_ms: Span = (100, 400)
    slow_share: float = 0.05
    side_by_side: int = 0
    """Every other model is a continuous one that runs this many requests at once; 0: none."""


class Kill(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="kill"):
    """SIGKILL. `in_call`: share that die inside a call to the log, before or after it took effect."""

    target: Role
    every_ms: Span
    in_call: float = 0.6
    restart_ms: Span = (100, 1_500)


class Stop(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="stop"):
    """SIGTERM: a clean stop, and a restart."""

    target: Role
    every_ms: Span
    restart_ms: Span = (100, 1_500)


class Pause(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pause"):
    """SIGSTOP and SIGCONT; `in_call` as for kill."""

    target: Role
    every_ms: Span
    for_ms: Span
    in_call: float = 0.6


class JoinLeave(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="join_leave"):
    """One more process of this role comes, and goes again."""

    target: Literal["ingress", "egress", "worker"]
    every_ms: Span
    stay_ms: Span


class Twin(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="twin"):
    """A second process of the same name starts while the first one lives, as after a split of the network."""

    target: Role
    every_ms: Span


class Evict(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="evict"):
    """The coordinator throws a member out of its group."""

    target: Literal["ingress", "egress"]
    every_ms: Span


class BrokerErrors(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="broker_errors"):
    """Shares of calls that fail. retriable: reads and plain writes; aborted: calls of a transaction; unknown: commits
    whose outcome the writer does not learn, half of them done.
    """

    retriable: float = 0.0
    aborted: float = 0.0
    unknown: float = 0.0


class SlowCalls(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="slow_calls"):
    """Share of transactional calls that take long; everybody else goes on meanwhile."""

    share: float
    for_ms: Span = (1, 60)


class Hold(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hold"):
    """One partition delivers nothing for a while."""

    every_ms: Span
    for_ms: Span


class SlowEngine(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="slow_engine"):
    """The engines of one worker run slower for a while."""

    every_ms: Span
    for_ms: Span
    factor: float


class LoseDevice(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lose_device"):
    """The first device of a worker is gone for a while; the worker lives and says so."""

    every_ms: Span
    for_ms: Span


class KillEngine(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="kill_engine"):
    every_ms: Span


class NewVersion(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="new_version"):
    """A model is declared again, with another version or another number of replicas."""

    every_ms: Span


class Delete(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="delete"):
    """A model is deleted, and declared again later. Requests for it may be rejected meanwhile, but never lost."""

    every_ms: Span
    for_ms: Span
    for_good: float = 0.0
    """Share of the deletions after which the model is not declared again."""


class Drain(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="drain"):
    """Somebody drains a worker, and puts it back into service later, whether it was drained by then or not."""

    every_ms: Span
    for_ms: Span


Fault = (
    Kill
    | Stop
    | Pause
    | JoinLeave
    | Twin
    | Evict
    | BrokerErrors
    | SlowCalls
    | Hold
    | SlowEngine
    | LoseDevice
    | KillEngine
    | NewVersion
    | Delete
    | Drain
)


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    """`swarm`: every world leaves each fault out with this chance, so that faults meet in many combinations."""

    title: str
    workload: Workload = Workload()
    fleet: Fleet = Fleet()
    engine: Engine = Engine()
    faults: tuple[Fault, ...] = ()
    swarm: float = 0.0
    heal_at_ms: int = 6_000
    """After this no faults."""
    drain_ms_max: int = 30_000
    """Then everything must end within this time."""
    settings: dict[str, int | str] = field(default_factory=dict)


def parse_scenario(text: str, name: str) -> Scenario:
    """Raises ConfigError naming the scenario, the field and what is wrong with it."""
    try:
        scenario = msgspec.toml.decode(text, type=Scenario, strict=False)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"scenario {name!r}: {error}") from error
    for fault in scenario.faults:
        for span_name in ("every_ms", "for_ms", "stay_ms", "restart_ms"):
            low, high = getattr(fault, span_name, (1, 1))
            if not 0 < low <= high:
                raise ConfigError(f"scenario {name!r}: {span_name} = [{low}, {high}]: least and most, both above 0")
    return scenario


def unknown_scenario(name: str, known: list[str]) -> ConfigError:
    return ConfigError(f"unknown scenario {name!r}. Known: {', '.join(known)}.{did_you_mean(name, known)}")
