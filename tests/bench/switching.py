"""Models that share a device too small for all of them: `python -m tests.bench.switching`.

Everything runs in real engine processes over one arena, under the residency that workers use. Rates are against what
memcpy does on this machine between the same measurements; loads are against full cold loads of the same models.

  resident  one request to each of several models that are on the device, in turns: what the change itself costs
  host      SmolLM2 leaves and comes back from host memory, from the disk, and by a full cold load
  soak      200 switches between two models: answers, ledger and memory
  zipf      117 encoders, their weights three times the device, requests by Zipf's law
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from gpu_worker.engine_port import ModelLoaded
from gpu_worker.memory.mapper import WORKSPACE_BYTES
from sie_stream.control import ModelLaunch
from tests.bench.device import DEVICE, MIB, Answer, Engines, engines, launch
from tests.bench.encoders import encoders
from tests.bench.engine import SMOLLM2

MINILM = SMOLLM2.parent / "minilm-l6-v2"
MODELS = 117
ROOMY_BYTES = 1_200 * MIB
"""Of a device on which all models of parts resident and soak have room."""
GOALS = {
    "resident_p99_ms": ("<=", 17.0),
    "host_rate_of_memcpy": (">=", 0.6),
    "zipf_disk_waits": ("<=", 0.01),
    "zipf_arena_used": (">=", 0.89),
    "cold_start_p99_warm_of_cold": ("<=", 0.2),
}


def smollm2() -> ModelLaunch:
    return launch(SMOLLM2, kind="text_generation", max_tokens=1, kv_mb=32)


def minilm() -> ModelLaunch:
    return launch(MINILM, kind="embedding")


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


class Memcpy:
    """Copies between two buffers that are there already, by one thread, as the mover is one. Rates in bytes per ms."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers = [ctypes.create_string_buffer(size) for _ in range(2)]
        for buffer in self._buffers:
            ctypes.memset(buffer, 1, size)
        self.rates: list[float] = []

    def measure(self) -> None:
        started = time.perf_counter()
        ctypes.memmove(self._buffers[0], self._buffers[1], self._size)
        self.rates.append(self._size / ((time.perf_counter() - started) * 1_000))


# ---------------------------------------------------------------- parts


def resident(rounds: int) -> dict[str, Any]:
    """The first request after another model's, against one that follows its own kind, of the same model."""
    with engines(ROOMY_BYTES, 2_000 * MIB) as run, tempfile.TemporaryDirectory() as folder:
        for slot, one in enumerate([minilm(), *(launch(path, kind="embedding") for path in encoders(Path(folder)))], 1):
            run.load(slot, one)
        slots = list(run.memory.slots)
        for slot in slots:
            run.ask(slot)
        run.settle()
        extra: list[float] = []
        for turn in range(rounds):
            slot = slots[turn % len(slots)]
            first, second = run.ask(slot), run.ask(slot)
            assert first.came_from == second.came_from == "resident"
            extra.append(first.ms - second.ms)
    return {
        "switches": rounds,
        "models": len(slots),
        "resident_p50_ms": round(percentile(extra, 0.5), 3),
        "resident_p99_ms": round(max(0.0, percentile(extra, 0.99)), 3),
    }


def host(rounds: int) -> dict[str, Any]:
    with engines(800 * MIB, 2_000 * MIB) as run:
        started = time.perf_counter()
        loaded = run.load(1, smollm2())
        run.settle()
        run.ask(1)
        cold_ms = (time.perf_counter() - started) * 1_000
        memcpy = Memcpy(loaded.image_bytes)
        memcpy.measure()
        memcpy.rates.clear()
        ms: dict[str, list[float]] = {"host": [], "disk": []}
        for turn in range(rounds):
            tier = "disk" if turn % 4 == 3 else "host"
            run.memory.evict(1)
            run.links.deactivate(run.key, 1)
            run.memory.host_bytes = 0 if tier == "disk" else 2_000 * MIB
            run.settle()
            run.memory.slots[1].moving = None
            if run.memory.slots[1].below != tier:
                run.links.move_image(run.key, 1, tier)
                while run.memory.slots[1].below != tier:
                    for event in run.links.poll(1.0):
                        run.heed(event)
            memcpy.measure()
            before = len(run.switches)
            run.ask(1)
            ms[tier] += [one.ms for one in run.switches[before:]]
            memcpy.measure()
        rate = loaded.image_bytes / statistics.median(ms["host"])
        return {
            "image_mb": round(loaded.image_bytes / MIB, 1),
            "host_ms": round(statistics.median(ms["host"]), 1),
            "disk_ms": round(statistics.median(ms["disk"]), 1) if ms["disk"] else None,
            "cold_load_ms": round(cold_ms),
            "memcpy_gb_s": round(statistics.median(memcpy.rates) / 1e6, 2),
            "host_gb_s": round(rate / 1e6, 2),
            "host_rate_of_memcpy": round(rate / statistics.median(memcpy.rates), 3),
            "cold_load_of_host": round(cold_ms / statistics.median(ms["host"]), 1),
        }


def either(larger: ModelLoaded, smaller: ModelLoaded) -> int:
    """Bytes of a device for two models of one engine that has either of them, beside what never leaves it, and not
    both: half of the smaller one is lacking."""
    staying = sum((larger.pools | smaller.pools).values()) + WORKSPACE_BYTES
    return staying + larger.image_bytes + smaller.image_bytes // 2


def soak(switches: int) -> dict[str, Any]:
    """Two models that do not fit together, in turns. A KV pool stays, so the ledger's baseline is after the first."""
    models = [smollm2(), minilm()]
    with engines(ROOMY_BYTES, 2_000 * MIB) as run:
        device_bytes = either(*[run.load(slot, one) for slot, one in enumerate(models, 1)])
    with engines(device_bytes, 2_000 * MIB) as run:
        for slot, one in enumerate(models, 1):
            run.load(slot, one)
        expected = {slot: run.ask(slot).outputs for slot in (1, 2)}
        wrong = 0
        held: list[int] = []
        for turn in range(switches):
            slot = 1 + turn % 2
            other = 3 - slot
            if run.memory.slots[other].place == "in":
                run.memory.evict(other)
                run.links.deactivate(run.key, other)
            wrong += run.ask(slot).outputs != expected[slot]
            run.settle()
            info = psutil.Process(run.pid).memory_info()
            held.append(info.rss - info.shared)
        for slot in (1, 2):
            run.unload(slot)
        run.memory.drop_group(DEVICE)
        balance = run.memory.ledger.balance()
        return {
            "switches": len(run.switches),
            "device_mb": round(device_bytes / MIB),
            "wrong_answers": wrong,
            "ledger_free_of_total": balance.free / balance.total,
            "private_mb_after_20": round(held[min(20, len(held) - 1)] / MIB, 1),
            "private_mb_at_end": round(held[-1] / MIB, 1),
        }


def zipf(requests: int, count: int) -> dict[str, Any]:
    """The device holds a third of all weights, host memory `HOST_SHARE` of them; the rest is on the disk."""
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = encoders(Path(folder))
        launches = [launch(paths[number % len(paths)], kind="embedding") for number in range(count)]
        total = sum(_image_bytes(paths[number % len(paths)]) for number in range(count))
        with engines(total // 3, round(total * HOST_SHARE)) as run:
            cold_ms = _cold_starts(run, launches)
            for slot, one in enumerate(launches, 1):
                run.load(slot, one)
            run.settle()
            order = list(run.memory.slots)
            chance.shuffle(order)
            weights = [1 / rank for rank in range(1, count + 1)]
            used: deque[float] = deque()
            answers: list[Answer] = []
            for slot in chance.choices(order, weights, k=requests):
                answers.append(run.ask(slot))
                used.append(1 - run.memory.pool.free / run.memory.pool.count)
    warm = answers[requests // 5 :]  # likelihoods are learned first
    starts = [one.ms for one in warm if one.came_from != "resident"]
    return {
        "models": count,
        "weights_of_device": round(total / run.memory.ledger.total_bytes, 2),
        "host_memory_of_weights": HOST_SHARE,
        "requests": len(warm),
        "resident": round(sum(one.came_from == "resident" for one in warm) / len(warm), 3),
        "zipf_disk_waits": round(sum(one.came_from == "disk" for one in warm) / len(warm), 4),
        "zipf_arena_used": round(statistics.fmean(used), 3),
        "cold_start_p99_ms_warm_pool": round(percentile(starts, 0.99), 1),
        "cold_start_p99_ms_without": round(percentile(cold_ms, 0.99), 1),
        "cold_start_p99_warm_of_cold": round(percentile(starts, 0.99) / percentile(cold_ms, 0.99), 3),
    }


HOST_SHARE = 0.85


def _image_bytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


def _cold_starts(run: Engines, launches: Sequence[ModelLaunch]) -> list[float]:
    """From asking for a model that is nowhere to its answer. The process and its libraries are there already."""
    run.load(10_000, launches[0])
    run.ask(10_000)
    found: list[float] = []
    for number, one in enumerate(launches[:COLD_STARTS], 10_001):
        started = time.perf_counter()
        run.load(number, one)
        run.ask(number)
        found.append((time.perf_counter() - started) * 1_000)
        run.unload(number)
    run.unload(10_000)
    return found


COLD_STARTS = 40
PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "resident": lambda options: resident(options.rounds),
    "host": lambda options: host(min(options.rounds, 40)),
    "soak": lambda options: soak(options.switches),
    "zipf": lambda options: zipf(options.requests, options.models),
}


def show(console: Console, report: dict[str, dict[str, Any]]) -> bool:
    """Whether every goal that was measured is met."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("PART", "FIGURE", "VALUE", "GOAL", ""):
        table.add_column(column)
    met = True
    for part, measured in report.items():
        for name, value in measured.items():
            sign, goal = GOALS.get(name, ("", None))
            kept = goal is None or (value <= goal if sign == "<=" else value >= goal)
            met = met and kept
            table.add_row(part, name, str(value), f"{sign} {goal}" if goal else "", "" if kept else "missed")
    console.print(table)
    return met


def main() -> int:
    parser = argparse.ArgumentParser(prog="switching", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", choices=tuple(PARTS), action="append")
    parser.add_argument("--rounds", type=int, default=200, help="of parts resident and host (at most 40 there)")
    parser.add_argument("--switches", type=int, default=200, help="of the soak")
    parser.add_argument("--requests", type=int, default=2_000, help="of part zipf")
    parser.add_argument("--models", type=int, default=MODELS, help="of part zipf")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args()
    report = {name: part(options) for name, part in PARTS.items() if not options.only or name in options.only}
    met = show(Console(), report)
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
