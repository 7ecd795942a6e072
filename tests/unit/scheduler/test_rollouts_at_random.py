"""Workers and engines come and go while versions are rolled out: no topic is forgotten, and nothing is said twice."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from scheduler.limits import DELETE_GIVE_UP_MS, DELETE_LINGER_MS, ENGINE_AWAY_MS, REPLACE_AFTER_MS
from scheduler.state import from_bytes, to_bytes
from scheduler.variants import units_of
from sie_stream.commands import RolloutOrder
from sie_stream.control import EngineLost
from sie_stream.engine_facts import EngineModel
from sie_stream.rollout_records import RoutesHeld, VariantWindow
from tests.examples import rounds
from tests.unit.scheduler.kit import Cluster, decisions, joined, spec_json
from tests.unit.scheduler.rolling import QUICK, UNIT, WINDOW_MS, Rolling, answered

SEEDS = rounds(15)
TURNS = 60
MEMORY_MB = 150
"""Of a worker: room for one replica, sometimes for two."""


class Troubled(Rolling):
    """Two or three workers, one model, and whatever happens to them."""

    def __init__(self, seed: int) -> None:
        Cluster.__init__(self)
        self.chance = random.Random(seed)
        self.incarnations: Counter[str] = Counter()
        self.alive: dict[str, str] = {}
        self.versions = 1
        self.lead()
        self.append(RoutesHeld("ingress-0"))
        for worker in ("w0", "w1", "w2")[: self.chance.choice((2, 3))]:
            self.join(worker)
        self.apply(self.spec())
        self.make_ready()

    def spec(self, **fields: Any) -> bytes:
        return spec_json(version=f"{self.versions}.0.0", memory_mb=self.chance.choice((60, 100, 100)), **fields)

    def join(self, worker: str) -> None:
        self.alive[worker] = f"i{self.incarnations[worker]}"
        self.incarnations[worker] += 1
        self.append(joined(worker, self.alive[worker], MEMORY_MB))

    def passes(self, ms: int) -> list[str]:
        commands = self.wait(ms, tuple(self.alive.items()))
        self.fence(commands)
        self.append(RoutesHeld("ingress-0"))
        return [one.kind for one in decisions(commands)]

    def units(self) -> list[str]:
        return [unit.model for unit in units_of(self.machine.state, "churn")]

    def turn(self) -> None:
        pick = self.chance.choice
        name = pick(["churn", *self.units()])
        match pick(("lose", "join", "end", "ready", "ready", "roll", "order", "windows", "drain", "passes")):
            case "lose" if self.alive:
                self.alive.pop(pick(sorted(self.alive)))
                self.passes(4_000)
            case "join":
                gone = [worker for worker in self.incarnations if worker not in self.alive]
                if gone:
                    self.join(pick(gone))
            case "end":
                self.end_engine(name)
            case "ready":
                self.make_ready(name)
            case "roll":
                self.versions += 1
                plan = {**QUICK, "steps": [50, 100], "shadow": pick((False, False, True))}
                self.apply(self.spec(rollout=plan))
            case "order":
                self.append(RolloutOrder("churn", pick(("abort", "promote", "pause", "resume")), actor="ada"))
            case "windows" if self.alive:
                self.answers(pick((0, 0, 60)))
            case "drain":
                self.work_off()
            case _:
                self.passes(pick((500, 5_000, ENGINE_AWAY_MS, REPLACE_AFTER_MS, DELETE_LINGER_MS)))

    def answers(self, failed: int) -> None:
        """Two windows of each version; of the new one so many answers are failures."""
        for _ in range(2):
            start_ms = self.now_ms
            self.passes(WINDOW_MS)
            for rollout in list(self.model().rollouts.values()):
                old, new = ("stable", rollout.version_before), (rollout.variant, rollout.version)
                for named, stats in ((old, answered(400)), (new, answered(100, failed=failed))):
                    self.append(VariantWindow("churn", *named, start_ms, self.now_ms, True, stats))

    def end_engine(self, name: str) -> None:
        for replica in self.model(name).replicas:
            if replica.state == "ready" and replica.worker in self.alive:
                launch = self.model(name).launches[replica.generation]
                loaded = (EngineModel(name, launch.version, replica.placement_epoch),)
                at = (replica.worker, replica.incarnation, replica.device)
                self.append(EngineLost(*at, "sklearn", "SIGKILL", loaded, 1, ("r1",), domain=launch.domain))

    def work_off(self) -> None:
        for name in ["churn", *self.units()]:
            if name in self.machine.state.models:
                self.release(name)
            if name in self.machine.state.models and self.model(name).working_off:
                self.drain_unit(name)

    def strand(self) -> None:
        """The workers of versions that are rolled out are gone for good, and somebody gives these up."""
        homes = {replica.worker for name in self.units() for replica in self.model(name).replicas}
        for worker in homes & self.alive.keys():
            self.alive.pop(worker)
        self.passes(60_000)
        self.append(RolloutOrder("churn", "abort", actor="ada"))
        self.load_all()
        self.passes(60_000)
        self.load_all()

    def heal(self) -> None:
        """All workers are there, and everything loads."""
        self.append(RolloutOrder("churn", "abort", actor="ada"))
        for worker in ["w9", *self.incarnations]:
            if worker not in self.alive:
                self.join(worker)
        for _ in range(40):
            self.passes(REPLACE_AFTER_MS // 4)
            self.load_all()
            self.work_off()

    def load_all(self) -> None:
        for name in ["churn", *self.units()]:
            self.make_ready(name)


@pytest.mark.parametrize("start", range(0, SEEDS, 5))
def test_what_variants_were_given_is_worked_off_and_a_quiet_cluster_is_silent(start: int) -> None:
    for seed in range(start, min(start + 5, SEEDS)):
        cluster = Troubled(seed)
        for _ in range(TURNS):
            cluster.turn()
        cluster.strand()
        said = cluster.passes(DELETE_GIVE_UP_MS + 60_000)
        assert said in ([], ["rollout_held"]), seed  # that nobody reports answers is told again after so long
        assert from_bytes(to_bytes(cluster.machine.state)) == cluster.machine.state
        cluster.heal()
        assert cluster.units() == [], seed
        assert not cluster.machine.state.rolling, seed
        over = [one for one in decisions(cluster.commands, "model_deleted") if one.subject == UNIT]
        left = [one.reason for one in over if one.chosen["partitions_left"] != "none"]
        lost = [why for why in left if "were given up" not in why]  # nobody let them load in all that time
        assert lost == [], (seed, lost)
