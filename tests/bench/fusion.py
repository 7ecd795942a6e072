"""Scenario `fusion`: 117 models in one pool against 117 services of one model each; memory, start and throughput.

The pool has two workers, shared Stage 0 and everything else that `sie-stream up` starts, checks inputs and outputs and
deduplicates; a service is the plainest loop that decodes, scores and commits exactly once. All models are the same
logistic regression, so weights are nothing and what remains is what a service costs beside them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sie_stream.cli.cluster import Layout
from sie_stream.ports import TopicSpec
from tests.bench.drain import Drain, Drained
from tests.bench.pipeline import groups
from tests.bench.usage import family
from tests.bench.workload import MODEL, MODELS_DIR
from tests.bench.world import Job, World, engine, is_ok, jobs, python, world
from tests.waiting import wait_until
from topics.edge.admin import KafkaAdmin

MODELS, MODELS_QUICK = 117, 12
RECORDS, RECORDS_QUICK = 117_000, 12_000
WORKERS = 2
START_S = 600.0
TARGET = "lone.results"
MIB = 1024 * 1024


def run(quick: bool) -> dict[str, float]:
    models, records = (MODELS_QUICK, RECORDS_QUICK) if quick else (MODELS, RECORDS)
    pool, services = pooled(models, records), alone(models, records)
    return {
        "models": models,
        **{f"pool_{name}": value for name, value in pool.items()},
        **{f"services_{name}": value for name, value in services.items()},
        "memory_ratio": services["memory_mb"] / pool["memory_mb"],
        "start_ratio": services["start_s"] / pool["start_s"],
        "throughput_ratio": pool["per_second"] / services["per_second"],
        "cpu_ratio": pool["per_cpu_s"] / services["per_cpu_s"],
    }


def pooled(models: int, records: int) -> dict[str, float]:
    names = [f"scorer-{number:03d}" for number in range(models)]
    with world() as here:
        started = time.monotonic()
        with engine(here, Layout(workers=WORKERS)) as sie:
            sie.declare(names, 1)
            start_s = time.monotonic() - started
            billed = groups(sie, here.broker.pid)
            drain = Drain(here.bootstrap, sie.topics.requests, sie.topics.results, billed, sie.check, names)
            drain.warm_up(records // 5)
            drained = drain.measure(records)
            drain.check(repeats_allowed=False, good=is_ok)
            children = [child.pid for child in sie.supervisor.children.values()]
            return figures(drained, start_s, children)


def alone(models: int, records: int) -> dict[str, float]:
    topics = {f"scorer-{number:03d}": f"lone.{number:03d}" for number in range(models)}
    with world() as here:
        specs = [TopicSpec(topic, 1, {}) for topic in topics.values()]
        KafkaAdmin(here.bootstrap).ensure([*specs, TopicSpec(TARGET, 4, {})])
        folder = str(MODELS_DIR / MODEL)
        commands = {
            name: python("tests.bench.lone_job", here.bootstrap, topic, TARGET, folder)
            for name, topic in topics.items()
        }
        started = time.monotonic()
        with jobs(here, commands) as running:
            wait_until(lambda: ready(here, running), f"{models} services to be ready", START_S)
            start_s = time.monotonic() - started
            pids = [job.pid for job in running]

            def alive() -> None:
                for job in running:
                    job.check()

            billed = {"services": pids, "broker": [here.broker.pid]}
            drain = Drain(here.bootstrap, "", TARGET, billed, alive, list(topics), topics.__getitem__)
            drain.warm_up(records // 5)
            drained = drain.measure(records)
            drain.check(repeats_allowed=False)
            return figures(drained, start_s, pids)


def ready(here: World, running: Sequence[Job]) -> bool:
    for job in running:
        job.check()
    return all(b"ready" in (here.folder / f"{job.name}.log").read_bytes() for job in running)


def figures(drained: Drained, start_s: float, pids: Sequence[int]) -> dict[str, float]:
    """Memory is proportional (pages that processes share are divided among them), of all processes but the broker."""
    clients = sum(spent for group, spent in drained.cpu_s.items() if group != "broker")
    memory = sum(process.memory_full_info().pss for process in family(pids))
    return {
        "memory_mb": memory / MIB,
        "processes": len(family(pids)),
        "start_s": start_s,
        "per_second": drained.per_second,
        "per_cpu_s": drained.records / (clients + drained.cpu_s["broker"]),
    }
