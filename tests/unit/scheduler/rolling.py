"""A cluster whose one model is being rolled out, for tests and recorded histories."""

from __future__ import annotations

from sie_stream.control import PartitionReleased, RouteRow
from sie_stream.rollout_records import RoutesHeld, VariantStats, VariantWindow
from sie_stream.settings import Settings
from sie_stream.sketch import sketch_of
from tests.unit.scheduler.kit import Cluster, decisions, joined, kinds, spec_json

ALIVE = (("w0", "i0"), ("w1", "i0"))
UNIT = "churn.CANARY"
QUICK = {"hold_ms": 2_000, "samples_min": 100}
WINDOW_MS = 2_000


class Rolling(Cluster):
    """A cluster with one model that serves version 1.0.0."""

    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__(settings)
        self.lead()
        for worker, incarnation in ALIVE:
            self.append(joined(worker, incarnation))
        self.append(RoutesHeld("ingress-0"))
        self.apply(spec_json())
        self.make_ready()

    def roll(self, version: str = "2.0.0", **fields: object) -> list[str]:
        """Declare the next version with a rollout. Returns the kinds of decisions that follow at once."""
        commands = self.apply(spec_json(version=version, **{"rollout": QUICK, **fields}))
        return [decision.kind for decision in decisions(commands)]

    def windows(self, count: int = 1, new: VariantStats | None = None, old: VariantStats | None = None) -> list[str]:
        """Windows of both variants, each after the time it took. Returns the kinds of decisions that follow."""
        said: list[str] = []
        for _ in range(count):
            start_ms = self.now_ms
            said += [decision.kind for decision in decisions(self.wait(WINDOW_MS, ALIVE))]
            rollout = next(iter(self.model().rollouts.values()), None)
            if rollout is None:
                break
            for variant, version, stats in (
                ("stable", "1.0.0", old or answered(400)),
                (rollout.variant, rollout.version, new or answered(100)),
            ):
                window = VariantWindow("churn", variant, version, start_ms, self.now_ms, True, stats)
                said += [decision.kind for decision in decisions(self.append(window))]
        return said

    def drain_unit(self, name: str) -> None:
        """Workers give back, as drained, what they hold of a unit that is worked off."""
        for partition in list(self.model(name).partitions):
            if name in self.machine.state.models and partition.owner is not None:
                owner = partition.owner
                self.append(
                    PartitionReleased(
                        owner.worker, owner.incarnation, name, partition.partition, partition.epoch, 9, True
                    )
                )

    @property
    def route(self) -> RouteRow:
        return self.row("routes", "churn", RouteRow)

    def shares(self) -> dict[str, int]:
        return {variant.variant: variant.weight for variant in self.route.variants}

    def rollout_decisions(self) -> list[str]:
        return [kind for kind in kinds(self.commands) if kind.startswith("rollout")]


def answered(count: int, failed: int = 0, score: float = 0.5, ms: float = 20.0, violations: int = 0) -> VariantStats:
    """`count` answers whose scores spread around `score`, and `failed` failures."""
    scores = sketch_of(score * (0.8 + 0.4 * number / max(1, count - 1)) for number in range(count))
    return VariantStats(
        ok=count,
        failed=failed,
        schema_violations=violations,
        busy_us=count * 100,
        latency=sketch_of(ms * (0.9 + 0.2 * number / count) for number in range(count)),
        scores={"score": scores},
    )
