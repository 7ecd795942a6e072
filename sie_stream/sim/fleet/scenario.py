"""A scenario of the fleet simulator: servers, models, traffic, faults, and the TOML file that says so.

Every field has a default. Errors name the field, its value, what is allowed and the nearest spelling. A scenario and a
seed are one world. One worker per server (`workers = "per-server"`) reports all GPUs of its server, as a worker host
with one engine process per device does; with `"per-gpu"` each GPU has a host of its own. A lost GPU is reported by its
host, which goes on. The fold supports both.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct, field

from sie_stream.errors import ConfigError, did_you_mean

WORKERS = ("per-server", "per-gpu")
SHAPES = ("flat", "day", "double-peak")
FAULTS = ("server-lost", "gpu-lost", "worker-paused", "drain", "rolling-restart")


class Fleet(Struct, frozen=True, forbid_unknown_fields=True):
    servers: int = 32
    gpus: int = 8
    """Per server."""
    workers: str = "per-server"
    memory_mb: int = 81_920
    """Of one GPU, as the driver says it; an A100 has this."""
    reserve_mb: int = 1_024
    """Taken by the driver and the engines' contexts: not offered to models, and not counted as used."""


class Models(Struct, frozen=True, forbid_unknown_fields=True):
    count: int = 117
    replicas: int = 267
    """Declared minimum, all models together."""
    elastic: int = 4
    """A model may grow to so many times its minimum (at least to 4, at most to 32 replicas)."""


class Traffic(Struct, frozen=True, forbid_unknown_fields=True):
    requests_per_s: float = 2_800.0
    """On average over the shape's whole day."""
    shape: str = "day"
    start_hour: float = 8.0
    """Hour of the day at which the simulation begins."""
    burst_minutes: float = 60.0
    """A model has a burst once in so long on average; 0: never."""


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """`times` faults of one kind, `every_s` apart; who it hits is drawn from the seed."""

    kind: str
    at_s: float
    times: int = 1
    every_s: float = 60.0
    for_s: float = 300.0
    """Until it is repaired, goes on, is put back into service, or (rolling-restart) one worker's restart is over."""
    at_once: int = 1
    """rolling-restart: workers out of service together. drain: workers drained together."""


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    hours: float = 1.0
    step_ms: int = 1_000
    settle_minutes: float = 0.0
    """Traffic before anything is counted, and before the first fault: what depends on how the fleet began is over."""
    fleet: Fleet = Fleet()
    models: Models = Models()
    traffic: Traffic = Traffic()
    faults: tuple[Fault, ...] = ()
    settings: dict[str, int | str] = field(default_factory=dict)
    """Settings of the scheduler, by their names."""


BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("hours", 0.01, 24 * 31),
    ("step_ms", 100, 10_000),
    ("settle_minutes", 0, 1_440),
    ("fleet.servers", 1, 1_000),
    ("fleet.gpus", 1, 16),
    ("fleet.memory_mb", 1_024, 1 << 20),
    ("fleet.reserve_mb", 0, 1 << 16),
    ("models.count", 1, 1_000),
    ("models.replicas", 1, 10_000),
    ("models.elastic", 1, 64),
    ("traffic.requests_per_s", 0.1, 1e7),
    ("traffic.start_hour", 0, 24),
    ("traffic.burst_minutes", 0, 100_000),
)
FAULT_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("at_s", 0, 31 * 86_400),
    ("times", 1, 10_000),
    ("every_s", 0, 86_400),
    ("for_s", 0.1, 31 * 86_400),
    ("at_once", 1, 1_000),
)


def parse_scenario(text: str, name: str) -> Scenario:
    """Raises ConfigError naming the scenario, the field, its value, what is allowed and the nearest spelling."""
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"scenario {name!r}: not TOML: {error}") from error
    _known_keys(body, Scenario, name, "")
    try:
        scenario = msgspec.convert(body, Scenario)
    except msgspec.ValidationError as error:
        raise ConfigError(f"scenario {name!r}: {_with_value(str(error), body)}") from error
    _one_of(name, "fleet.workers", scenario.fleet.workers, WORKERS)
    _one_of(name, "traffic.shape", scenario.traffic.shape, SHAPES)
    for path, low, high in BOUNDS:
        _within(name, path, _at(scenario, path), low, high)
    for number, fault in enumerate(scenario.faults):
        _one_of(name, f"faults[{number}].kind", fault.kind, FAULTS)
        for path, low, high in FAULT_BOUNDS:
            _within(name, f"faults[{number}].{path}", getattr(fault, path), low, high)
    if scenario.models.replicas < scenario.models.count:
        raise ConfigError(
            f"scenario {name!r}: models.replicas = {scenario.models.replicas}: at least models.count = "
            f"{scenario.models.count}, one for each model."
        )
    return scenario


def unknown_scenario(name: str, known: list[str]) -> ConfigError:
    return ConfigError(
        f"unknown scenario {name!r}: no such file, and none shipped with that name. Shipped: {', '.join(known)}."
        f"{did_you_mean(name, known)}"
    )


def _known_keys(body: Any, kind: Any, name: str, path: str) -> None:
    """Every key of the document, down to the leaves."""
    if get_origin(kind) is tuple:
        for number, item in enumerate(body if isinstance(body, list) else []):
            _known_keys(item, get_args(kind)[0], name, f"{path}[{number}]")
        return
    if not (isinstance(kind, type) and issubclass(kind, Struct) and isinstance(body, dict)):
        return
    fields = get_type_hints(kind)
    for key, value in body.items():
        here = f"{path}.{key}" if path else key
        if key not in fields:
            raise ConfigError(
                f"scenario {name!r}: unknown field {here} = {value!r}. Allowed: {', '.join(fields)}."
                f"{did_you_mean(key, fields)}"
            )
        _known_keys(value, fields[key], name, here)


def _one_of(name: str, path: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"scenario {name!r}: {path} = {value!r}. Allowed: {', '.join(allowed)}.{did_you_mean(value, allowed)}"
        )


def _within(name: str, path: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"scenario {name!r}: {path} = {value:g}: allowed {low:g} to {high:g}.")


def _at(scenario: Scenario, path: str) -> float:
    found: Any = scenario
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _with_value(error: str, body: Any) -> str:
    """msgspec says where (`$.fleet.servers`, `$.faults[0].at_s`) and what is expected; add the value that is there."""
    where = re.search(r"`\$\.?([^`]*)`$", error)
    if where is None:
        return error
    value: Any = body
    for key, number in re.findall(r"([A-Za-z_]+)|\[(\d+)\]", where[1]):
        value = value[int(number)] if number else value.get(key)
    return f"{where[1]} = {value!r}: {error[: where.start()].removesuffix(' - at ')}."
