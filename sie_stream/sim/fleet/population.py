"""The models of a scenario: declarations as a user would write them, and the same as arrays for the engine model.

Engine laws come from the declared baselines: the latency of one call is a straight line in the batch size, fitted by
least squares (`line`), as measured on GPUs for most models (Inoue, "Queueing analysis of GPU-based inference servers
with dynamic batching", 2021). Memory is interpolated the same way. Nothing else about an engine is told to the
simulator.

Families and their shares are ours, made to look like a mixed platform: many small scorers and embedders with most of
the requests, language models with most of the memory and nearly all of the compute. Latencies are round numbers of the
order that an A100 shows for models of that size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from sie_stream.sim.fleet.scenario import Scenario
from sie_stream.sim.fleet.traces import Fit

REPLICAS_MAX = 32
LOAD_MB_PER_MS = 2.0
"""Weights from local NVMe."""
START_MS = 3_000
"""An engine process, and its warm-up."""
AIM = 0.6
"""Share of a replica's capacity that the declared minimum is planned for, at the model's mean rate."""


class Family(Struct, frozen=True):
    name: str
    share: float
    """Of the models."""
    traffic: float
    """Of the requests."""
    service: str
    memory_mb: tuple[int, ...]
    """One of these; half of a generator's is KV cache, all of it is reserved by the engine when it starts."""
    base_ms: tuple[float, float]
    """Of a call, whatever its batch: from, to."""
    each_ms: tuple[float, float]
    """Per request in the batch."""
    batch: int
    sla_ms: int
    priorities: tuple[str, ...]
    tags: tuple[tuple[str, ...], ...]
    continuous: bool = False
    """Requests join and leave a running batch; otherwise the next batch waits for the one that runs."""
    trace: str = ""
    """Whose lengths and bursts it has; empty: fixed work per request."""


# Memory of generators: weights at 2 bytes (8B: 15,300 MiB, 14B: 28,200, 34B: 64,900), 1,500 MiB of workspace, and KV
# cache for a full batch. With grouped heads a token takes 0.125, 0.19 and 0.23 MiB: 48 chats of 2,900 to 3,500 tokens,
# 32 completions of 1,700 to 2,400, 32 short texts of 800 to 1,300.
CONV, CODE = "azure_llm_2023_conv.csv", "azure_llm_2023_code.csv"
TOOL = "mooncake_conversation.jsonl"
FAMILIES = (
    Family(
        *("scorer", 0.25, 0.50, "scoring", (300, 500, 800, 1_500), (1.5, 3.0), (0.02, 0.06), 256, 120),
        *(("P0", "P1"), (("high-sla",),)),
    ),
    Family(
        *("embedder", 0.15, 0.22, "embedding", (1_300, 2_300, 4_500), (6.0, 10.0), (0.4, 1.0), 64, 250),
        *(("P1",), ((), ("high-sla",))),
    ),
    Family(
        *("reranker", 0.10, 0.08, "rerank", (2_300, 4_600, 7_000), (8.0, 14.0), (1.0, 2.0), 32, 400),
        *(("P1",), (("cost-sensitive",), ())),
    ),
    Family(
        *("chat-8b", 0.28, 0.15, "text-generation", (34_000, 38_000), (1_800.0, 2_600.0), (30.0, 45.0), 48, 30_000),
        *(("P1",), (("high-sla",), (), ("cost-sensitive",)), True, CONV),
    ),
    Family(
        *("code-14b", 0.10, 0.025, "text-generation", (40_000, 44_000), (900.0, 1_300.0), (25.0, 40.0), 32, 20_000),
        *(("P1",), ((), ("cost-sensitive",)), True, CODE),
    ),
    Family(
        *("batch-34b", 0.12, 0.025, "text-generation", (72_000, 76_000), (6_000.0, 8_000.0), (90.0, 140.0), 32),
        *(180_000, ("P2",), (("batch-job",), ("batch-job", "cost-sensitive")), True, TOOL),
    ),
)
BATCHES = (1, 8, 16)
"""Sizes of the declared baselines, besides the largest."""


class Population(Struct, frozen=True):
    """All models; arrays have one entry per model, in the order of `names`."""

    names: tuple[str, ...]
    specs: tuple[bytes, ...]
    """Canonical declarations, as ApplyModel carries them."""
    families: tuple[str, ...]
    tags: tuple[tuple[str, ...], ...]
    rate: np.ndarray
    """Mean requests per second."""
    base_ms: np.ndarray
    each_ms: np.ndarray
    batch: np.ndarray
    sla_ms: np.ndarray
    sigma: np.ndarray
    """Of the lognormal work of one request (mean 1); 0: always the same."""
    continuous: np.ndarray
    memory_mb: np.ndarray
    """Reserved by a replica."""
    used_mb: np.ndarray
    """In use by a replica: weights, KV pool and workspace at the largest declared batch."""
    load_ms: np.ndarray
    replicas: np.ndarray
    """Declared minimum."""
    replicas_max: np.ndarray
    burst_cv: np.ndarray
    peak: np.ndarray
    lane: np.ndarray

    @property
    def per_s(self) -> np.ndarray:
        """Most requests per second of one replica that has a GPU to itself."""
        return 1000.0 * self.batch / (self.base_ms + self.each_ms * self.batch)


def line(batches: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """(constant, slope) of the least squares line; the slope is at least 0."""
    slope, constant = np.polyfit(np.array(batches, dtype=float), np.array(values, dtype=float), 1)
    return float(constant), max(0.0, float(slope))


def build(scenario: Scenario, fits: Mapping[str, Fit], seed: int) -> Population:
    chance = random.Random(f"{seed} population")
    chosen = _families(scenario.models.count)
    names = tuple(f"{family.name}-{number:03d}" for number, family in enumerate(chosen))
    rates = _rates(chosen, scenario.traffic.requests_per_s, chance)
    declared = [_declared(name, family, chance) for name, family in zip(names, chosen, strict=True)]
    laws = [_law(spec) for spec in declared]
    base, each = (np.array([law[part] for law in laws]) for part in range(2))
    batch = np.array([float(family.batch) for family in chosen])
    per_s = 1000.0 * batch / (base + each * batch)
    replicas = _replicas(rates / per_s, scenario.models.replicas)
    ceiling = np.minimum(REPLICAS_MAX, np.maximum(4, replicas * scenario.models.elastic))
    ceiling = np.minimum(np.maximum(ceiling, replicas), 64)
    for spec, low, high in zip(declared, replicas, ceiling, strict=True):
        spec["replicas"] = {"min": int(low), "max": int(high)}
    memory = np.array([float(spec["min_gpu_memory_mb"]) for spec in declared])
    return Population(
        names=names,
        specs=tuple(msgspec.json.encode(spec) for spec in declared),
        families=tuple(family.name for family in chosen),
        tags=tuple(tuple(spec["tags"]) for spec in declared),
        rate=rates,
        base_ms=base,
        each_ms=each,
        batch=batch,
        sla_ms=np.array([float(family.sla_ms) for family in chosen]),
        sigma=np.array([_sigma(fits[family.trace].tokens_cv) if family.trace else 0.0 for family in chosen]),
        continuous=np.array([family.continuous for family in chosen]),
        memory_mb=memory,
        used_mb=np.array([law[2] for law in laws]),
        load_ms=np.round(START_MS + memory / 2 / LOAD_MB_PER_MS),
        replicas=replicas,
        replicas_max=ceiling,
        burst_cv=np.array([fits[family.trace].burst_cv if family.trace else 0.05 for family in chosen]),
        peak=np.array([fits[family.trace].peak if family.trace else 1.5 for family in chosen]),
        lane=np.array([("P0", "P1", "P2").index(spec["priority_level"]) for spec in declared]),
    )


def _families(count: int) -> list[Family]:
    """`count` families by their shares, each spread over the list (largest remainder at every place)."""
    given = [0] * len(FAMILIES)
    chosen: list[Family] = []
    for place in range(1, count + 1):
        number = max(range(len(FAMILIES)), key=lambda n: (FAMILIES[n].share * place - given[n], -n))
        given[number] += 1
        chosen.append(FAMILIES[number])
    return chosen


def _rates(chosen: Sequence[Family], total: float, chance: random.Random) -> np.ndarray:
    """Within a family popularity is lognormal: the first of thirty models has about six times the median."""
    weights = [chance.lognormvariate(0.0, 0.8) for _ in chosen]
    sums: dict[str, float] = {}
    for family, weight in zip(chosen, weights, strict=True):
        sums[family.name] = sums.get(family.name, 0.0) + weight
    there = sum(family.traffic for family in FAMILIES if family.name in sums)
    return np.array(
        [
            total * family.traffic / there * weight / sums[family.name]
            for family, weight in zip(chosen, weights, strict=True)
        ]
    )


def _declared(name: str, family: Family, chance: random.Random) -> dict[str, Any]:
    """One declaration, without its replicas. Baselines are the true line with up to 2 % of measurement noise."""
    base, each = chance.uniform(*family.base_ms), chance.uniform(*family.each_ms)
    memory = chance.choice(family.memory_mb)
    sizes = [size for size in BATCHES if size < family.batch] + [family.batch]
    return {
        "name": name,
        "version": "1.0.0",
        "source": {"uri": f"hf://example/{name}"},
        "min_gpu_memory_mb": memory,
        "backend": {"name": "sglang" if family.continuous else "torch"},
        "service_type": family.service,
        "priority_level": chance.choice(family.priorities),
        "tags": list(chance.choice(family.tags)),
        "slas": {"p99_latency_ms": family.sla_ms},
        "batch_sizes": {"max": family.batch},
        "baselines": [
            {
                "batch_size": size,
                "latency_ms": round((base + each * size) * chance.uniform(0.98, 1.02), 3),
                "memory_mb": _used_mb(family, memory, size),
            }
            for size in sizes
        ],
    }


def _used_mb(family: Family, memory: int, size: int) -> float:
    """An engine for generation takes all of its pool when it starts; others grow with the batch, up to 97 %."""
    share = 1.0 if family.continuous else 0.72 + 0.25 * size / family.batch
    return round(memory * share, 1)


def _law(spec: dict[str, Any]) -> tuple[float, float, float]:
    """(constant ms, ms per request, MiB at the largest batch), from what is declared alone."""
    sizes = [float(baseline["batch_size"]) for baseline in spec["baselines"]]
    base, each = line(sizes, [baseline["latency_ms"] for baseline in spec["baselines"]])
    return max(base, 0.01), each, max(float(baseline["memory_mb"]) for baseline in spec["baselines"])


def _replicas(loads: np.ndarray, total: int) -> np.ndarray:
    """`total` replicas: one each, the others one by one to the model with the most load per replica."""
    replicas = np.ones(len(loads), dtype=np.int64)
    for _ in range(total - len(loads)):
        replicas[int(np.argmax(np.where(replicas < REPLICAS_MAX, loads / replicas, -1.0)))] += 1
    return replicas


def _sigma(cv: float) -> float:
    """Of the lognormal distribution with this coefficient of variation."""
    return math.sqrt(math.log(1 + cv * cv))
