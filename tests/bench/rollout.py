"""Scenario `rollout`: what a good rollout does to the p99 of the stable traffic.

Calm, rollout, calm, rollout, ..., calm: each rollout is held against the calm before and after it, so that a machine
that slows down by itself slows both. At the rate and with the one worker of `sie-stream demo-canary`.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time

from msgspec import Raw

from sie_stream.cli.ask import ask, of_kind
from sie_stream.cli.canary_load import SETTLE_S, Load, try_rates
from sie_stream.cli.canary_rate import RATES, rate_with_room
from sie_stream.cli.cluster import Layout
from sie_stream.cli.declare import apply_specs, load_specs, with_absolute_paths
from sie_stream.cli.rollout import followed
from sie_stream.cli.rollout_view import history_rows
from sie_stream.control import ApplyModel
from sie_stream.spec import Gates, ModelSpec, Rollout, to_json
from tests.bench.workload import MODELS_DIR
from tests.bench.world import READY_S, Engine, engine, wait, world

MODEL = "wine-rf"
WARM_S, WARM_S_QUICK = 60.0, 5.0
CALM_S, CALM_S_QUICK = 30.0, 6.0
ROLLOUTS, ROLLOUTS_QUICK = 6, 1
HOLD_MS = 6_000
ANSWERED_S = 20.0


def run(quick: bool) -> dict[str, float]:
    rollouts = ROLLOUTS_QUICK if quick else ROLLOUTS
    with world("steady") as here, engine(here, Layout(workers=1)) as sie:
        spec, folder = load_specs(MODELS_DIR / MODEL / "model-spec.yaml")[0]
        apply_specs(sie.cluster.connection, [(spec, folder)], READY_S, lambda count: None, sie.cluster.watch)
        rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        with Load(sie.cluster.connection, MODEL, rows) as load:
            load.pace(RATES[0])
            wait(WARM_S_QUICK if quick else WARM_S)
            rate = rate_with_room(try_rates(load, wait))
            load.pace(rate)
            calm, during = [p99(load, CALM_S_QUICK if quick else CALM_S)], list[float]()
            for number in range(rollouts):
                during.append(rolled_out(sie, load, with_absolute_paths(spec, folder), f"{number + 2}.0.0"))
                calm.append(p99(load, CALM_S_QUICK if quick else CALM_S))
            load.stop()
            load.drain(ANSWERED_S)
            assert load.statuses == {"ok": load.sent}, f"of {load.sent}: {load.statuses}"
        sie.check()
    beside = [(before + after) / 2 for before, after in itertools.pairwise(calm)]
    return {
        "rate_per_s": float(rate),
        "p99_calm_ms": statistics.median(calm),
        "p99_during_ms": statistics.median(during),
        "p99_moved_ms": statistics.median(one - other for one, other in zip(during, beside, strict=True)),
        "p99_moved_ratio": statistics.median(one / other for one, other in zip(during, beside, strict=True)),
        "calm_lowest_ms": min(calm),
        "calm_highest_ms": max(calm),
    }


def p99(load: Load, seconds: float) -> float:
    """Milliseconds, of the stable version, while nothing is rolled out."""
    wait(SETTLE_S)
    load.forget()
    wait(seconds)
    return stable_p99(load)


def rolled_out(sie: Engine, load: Load, spec: ModelSpec, version: str) -> float:
    """The p99 of the version that was there before, while this one takes over."""
    load.forget()
    rollout = Rollout(hold_ms=HOLD_MS, samples_min=100, gates=Gates(p99_ratio_max=5.0))
    command = ApplyModel(Raw(to_json(spec.model_copy(update={"version": version, "rollout": rollout}))), "bench")
    [answer] = ask(sie.cluster.connection, [command], [MODEL], of_kind({"rollout_started", "model_rejected"}), 15.0)
    assert answer.kind == "rollout_started", answer
    started = time.monotonic()
    for state in followed(sie.cluster.connection):
        sie.check()
        assert time.monotonic() < started + READY_S, f"{version} was not rolled out within {READY_S:g} s"
        for row in history_rows(state, MODEL):
            if row["version"] == version:
                assert row["ending"] == "completed", row
                return stable_p99(load)
    raise AssertionError("the log of the control plane ended")


def stable_p99(load: Load) -> float:
    found = load.p99_ms("stable")
    assert found is not None, "the stable version answered nothing"
    return found
