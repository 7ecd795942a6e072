"""From the SIGKILL of an engine to all its generations producing again: `python -m tests.bench.engine_kill`.

32 generations of the real SmolLM2 run side by side in a real engine process, which is killed. What the host does then
is done here: the model is loaded again, and the requests are submitted again. With the host-memory tier (setting
kv_tier_mb) and a spare process (spare_engines) they go on from their full blocks; without them a process is started and
everything is computed again. Both in one run; the ratio is what counts.

  producing   every generation has told a token that it had not told to this process before
  caught up   every generation has told as many tokens as before the kill
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gpu_worker.backends.base import EngineInput
from gpu_worker.edge.engine_link import EngineLinks
from gpu_worker.engine_port import BatchCompleted, EngineDied, EngineKey, LoadFailed, ModelLoaded, TokensStreamed
from sie_stream.control import ModelLaunch
from tests.bench.workload import MODELS_DIR

SMOLLM2 = MODELS_DIR / "smollm2-135m-instruct"
ENGINE = EngineKey("cpu:0", "torch")
PROMPT = 128
GENERATIONS = 32
BEFORE = 24
"""Tokens that each has told at least when the engine is killed."""
ANSWER = 160
GOAL_S = 3.2
MIB = 1024 * 1024
TIMEOUT_S = 900.0


@dataclass(slots=True)
class Watch:
    """What an engine tells, by generation. Times are seconds since `started`."""

    engines: EngineLinks
    told: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    """Tokens of the first delta."""
    loaded: bool = False
    died: bool = False

    def poll(self) -> None:
        for event in self.engines.poll(50):
            match event:
                case TokensStreamed():
                    for delta in event.deltas:
                        self.begun.setdefault(delta.batch_id, len(delta.token_ids))
                        self.told[delta.batch_id] = self.told.get(delta.batch_id, 0) + len(delta.token_ids)
                case ModelLoaded():
                    self.loaded = True
                case EngineDied():
                    self.died = True
                case LoadFailed() | BatchCompleted():
                    raise AssertionError(f"the measurement needs all of them under way: {event}")
                case _:
                    pass


def wait(watch: Watch, done: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not done():
        assert time.monotonic() < deadline, "not within the time"
        watch.poll()


def prompts(count: int) -> list[list[int]]:
    chance = random.Random(count)
    return [[chance.randrange(100, 40_000) for _ in range(PROMPT)] for _ in range(count)]


def launch(threads: int) -> ModelLaunch:
    config: dict[str, Any] = {
        "kind": "text_generation",
        "threads": threads,
        "max_num_seqs": GENERATIONS,
        "kv_mb": 768,
        "context_tokens": 1024,
    }
    return ModelLaunch("m", "1", "mi", "torch", str(SMOLLM2), "", config, "text-generation", 1, 0, 8)


def requests() -> list[EngineInput]:
    wanted = json.dumps({"max_tokens": ANSWER, "min_tokens": ANSWER, "temperature": 0.8}).encode()
    return [
        EngineInput(f"r{n}", b"{}", prompt, wanted, n, stream=True) for n, prompt in enumerate(prompts(GENERATIONS))
    ]


def measured(threads: int, tier_mb: int, spares: tuple[str, ...]) -> dict[str, float]:
    """Seconds after the kill."""
    engines = EngineLinks(threads, kv_tier_bytes=tier_mb * MIB, spares=spares)
    try:
        return _measured(engines, threads, bool(tier_mb))
    finally:
        engines.close()


def _measured(engines: EngineLinks, threads: int, resume: bool) -> dict[str, float]:
    items, asked = requests(), launch(threads)
    watch = Watch(engines)
    engines.load(ENGINE, 1, asked)
    wait(watch, lambda: watch.loaded)
    for number, item in enumerate(items):
        engines.submit(ENGINE, number, 1, [item])
    wait(watch, lambda: len(watch.told) == GENERATIONS and min(watch.told.values()) >= BEFORE)
    before = watch.told
    os.kill(engines.pids()[ENGINE], signal.SIGKILL)
    started = time.monotonic()
    found: dict[str, float] = {}
    wait(watch, lambda: watch.died)
    watch = Watch(engines)
    engines.load(ENGINE, 2, asked)
    wait(watch, lambda: watch.loaded)
    found["loaded_s"] = time.monotonic() - started
    for number, item in enumerate(items):
        engines.submit(ENGINE, number, 2, [msgspec.structs.replace(item, resume=resume)])

    def producing(number: int) -> bool:
        # With the tier the first delta may be what was told before the kill: only what comes after it is new.
        return watch.told.get(number, 0) > (watch.begun.get(number, 0) if resume else 0)

    wait(watch, lambda: all(producing(number) for number in before))
    found["producing_s"] = time.monotonic() - started
    wait(watch, lambda: all(watch.told.get(number, 0) >= count for number, count in before.items()))
    found["caught_up_s"] = time.monotonic() - started
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tier-mb", type=int, default=1024)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {
        "generations": GENERATIONS,
        "prompt_tokens": PROMPT,
        "threads": options.threads,
        "load": os.getloadavg(),
        "tier": measured(options.threads, options.tier_mb, (ENGINE.backend,)),
        "recompute": measured(options.threads, 0, ()),
    }
    for name in ("producing_s", "caught_up_s"):
        found[f"ratio_{name[:-2]}"] = found["tier"][name] / found["recompute"][name]
    found["goal_s"] = GOAL_S
    found["load_after"] = os.getloadavg()
    print(json.dumps(found, indent=2))
    return 0 if found["tier"]["producing_s"] <= GOAL_S else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
