"""The processes of a world: the hosts of production over the simulated log, wired as each main.py wires them.

The committer of a worker and the side effects of a scheduler run in lanes of their own, as they run in threads there.
"""

from __future__ import annotations

from processors.egress.host import EgressHost
from processors.ingress.host import IngressHost
from processors.outcomes.host import OutcomesHost
from processors.tokenise import TextEncoder
from processors.turns import Ports
from schemas.codec import encode_cluster
from sie_stream.control import (
    WorkerExited,
)
from sie_stream.errors import ConfigError
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from sie_stream.sim.parts import MadeOf, Parts
from sie_stream.sim.scenario import Role, Scenario
from sie_stream.sim.scheduler_process import SchedulerBody
from sie_stream.sim.worker_process import WorkerBody
from sie_stream.sim.world import EXIT_CLEAN, Lane, Process, World

EXIT_REPORTED = 0.6
"""Share of worker deaths that a supervisor reports."""


def start_fleet(world: World, scenario: Scenario) -> None:
    fleet = scenario.fleet
    roles: tuple[tuple[Role, int], ...] = (
        ("scheduler", fleet.schedulers),
        ("worker", fleet.workers),
        ("ingress", fleet.ingress),
        ("egress", fleet.egress),
        ("outcomes", fleet.outcomes),
    )
    for role, count in roles:
        for number in range(count):
            world.spawn(role, f"{role}-{number}")


class NoEncoders:
    def get(self, path: str, digest: str = "") -> TextEncoder:
        raise ConfigError(f"no tokenizers here: {path}")


class Notes:
    """Implements processors.turns.Watcher."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def event(self, name: str, **facts: object) -> None:
        self._lane.world.note(f"{self._lane.client}: {name} {facts}")


def ports(world: World, lane: Lane, settings: Settings, transactional_id: str) -> Ports:
    log = world.log
    return Ports(
        make_reader=lambda group: log.reader(group, lane.client),
        make_latest_reader=lambda group: log.latest_reader(group, lane.client),
        make_group_reader=lambda group: log.group_reader(group, lane.process.name, lane.client),
        writer=log.transactional_writer(
            transactional_id, settings.transaction_timeout_ms, settings.record_bytes_max, lane.client
        ),
        make_plain_writer=lambda: log.plain_writer(client=lane.client),
        clock=log.clock,
    )


class IngressBody:
    host_type = IngressHost

    def __init__(self, world: World, lane: Lane, parts: Parts) -> None:
        settings = parts.settings
        transactional_id = settings.topics.ingress_transactional_id(lane.process.name)
        self._world = world
        self._stopping = False
        self.host = self.host_type(
            settings, ports(world, lane, settings, transactional_id), NoEncoders(), Notes(lane), lane.process.name
        )

    def start(self) -> None:
        self.host.start()

    def turn(self) -> float | None:
        if self._stopping:
            self.host.close()
            return None
        settled = self.host.turn()
        return self._world.between((1, 5)) if settled else self._world.between((5, 100))

    def ask_to_stop(self) -> None:
        self._stopping = True


class EgressBody:
    def __init__(self, world: World, lane: Lane, parts: Parts) -> None:
        settings = parts.settings
        transactional_id = settings.topics.egress_transactional_id(lane.process.name)
        self._world = world
        self._stopping = False
        self.host = EgressHost(settings, ports(world, lane, settings, transactional_id), no_encoder, Notes(lane))

    def start(self) -> None:
        self.host.start()

    def turn(self) -> float | None:
        if self._stopping:
            self.host.close()
            return None
        settled = self.host.turn()
        return self._world.between((1, 5)) if settled else self._world.between((5, 100))

    def ask_to_stop(self) -> None:
        self._stopping = True


class OutcomesBody:
    def __init__(self, world: World, lane: Lane, parts: Parts) -> None:
        settings = parts.settings
        self._world = world
        self._stopping = False
        made = ports(world, lane, settings, f"{settings.topic_prefix}{lane.process.name}")
        self.host = OutcomesHost(settings, made, lane.process.name, Notes(lane))

    def start(self) -> None:
        self.host.start()

    def turn(self) -> float | None:
        if self._stopping:
            self.host.close()
            return None
        self.host.turn()
        return self._world.between((20, 200))

    def ask_to_stop(self) -> None:
        self._stopping = True


def no_encoder(path: str, digest: str) -> TextEncoder:
    raise ConfigError(f"no tokenizers here: {path}")


class Supervisor:
    """Reports the end of a worker to the scheduler: most of the time, and a little later."""

    def __init__(self, world: World, settings: Settings) -> None:
        self._world = world
        self._names = settings.topics
        self._writer = world.log.plain_writer(client="supervisor")

    def process_ended(self, process: Process, exit_code: int) -> None:
        if process.role != "worker" or exit_code == EXIT_CLEAN or self._world.random.random() >= EXIT_REPORTED:
            return
        report = WorkerExited(process.name, process.incarnation, exit_code, "simulator")
        write = LogWrite(self._names.cluster, encode_cluster(report), partition=0)
        self._world.after(self._world.between((1, 300)), lambda: self._writer.write([write]))


BODIES: dict[Role, MadeOf] = {
    "worker": WorkerBody,
    "ingress": IngressBody,
    "egress": EgressBody,
    "outcomes": OutcomesBody,
    "scheduler": SchedulerBody,
}
