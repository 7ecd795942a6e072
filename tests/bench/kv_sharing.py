"""What prefixes that requests share spare, on a chat trace: `python -m tests.bench.kv_sharing`.

The trace is the Mooncake conversation trace (arXiv:2407.00079) where it is found, else one of the same form that is
made up. It names the content of every 512 tokens by a number; here each number stands for one KV block of 16 tokens,
so that a small model can follow on a CPU.

Three measurements. Bookkeeping: the whole trace through the real step scheduler and pool without a network, by size of
the pool. Arrivals: requests as they came, through the same, in virtual time, where waiting behind others counts and the
machine does not. Serving: every request of some conversations, one after the other, on SmolLM2 with the cache and on
another engine without, in turns, so that both meet the same machine. The upper bound is what a cache of endless size
finds; served one by one, first tokens cannot be sooner by more than there are fewer tokens to compute (tokens_p50).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from gpu_worker.backends.base import EngineInput
from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.decoding.blocks import BlockPool
from gpu_worker.decoding.sequence import Sequence
from gpu_worker.decoding.step_scheduler import StepLimits, StepScheduler
from tests.bench.engine import SMOLLM2, decoder

TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "mooncake_conversation.jsonl"
BLOCK = 16
VOCABULARY = (100, 40_000)
POOLS = (2_000, 20_000, 50_000, 100_000, 200_000)
BLOCKS_MAX = 60
"""Longest prompt that is served."""
UTILISATIONS = (0.02, 0.7, 0.8)
"""How much of the time the engine without sharing would compute."""
STEP_COST = 17.0
"""What a step costs beside its tokens, in tokens: SmolLM2 on one core, 46 ms to read its weights and 2.7 a token."""


class Asked(msgspec.Struct, frozen=True):
    """A request of the trace: what is in its blocks, and when it came, in ms."""

    hash_ids: list[int]
    timestamp: float = 0.0


class Told(NamedTuple):
    """Of one request, which asks for one token."""

    first_token_ms: float
    cpu_ms: float
    tokens: list[int] | None


def trace_of(path: Path | None) -> list[Asked]:
    if path is None or not path.exists():
        return list(made_up(4_000))
    decode = msgspec.json.Decoder(Asked).decode
    return [decode(line) for line in path.read_bytes().splitlines() if line]


def made_up(requests: int) -> Iterator[Asked]:
    """Conversations under one system prompt; each turn repeats what was said and adds a few blocks."""
    chance = random.Random(1)
    talks: list[list[int]] = []
    fresh = 0
    for number in range(requests):
        if not talks or chance.random() < 0.4:
            talks.append([0])
        talk = talks[-1 - min(int(chance.expovariate(0.05)), len(talks) - 1)]
        count = 1 + int(chance.expovariate(0.2))
        talk += range(fresh + 1, fresh + 1 + count)
        fresh += count
        yield Asked(list(talk), 1_000.0 * number)


def tokens_of(hash_ids: list[int]) -> list[int]:
    """BLOCK tokens for every id, the same for the same id, and one more that is nobody else's."""
    low, high = VOCABULARY
    tokens: list[int] = []
    for number in hash_ids:
        chance = random.Random(number)
        tokens += [chance.randrange(low, high) for _ in range(BLOCK)]
    return [*tokens, low + hash_ids[-1] % (high - low)]


def bound(trace: list[Asked]) -> float:
    """Share of all blocks that were seen before as part of the same prefix."""
    return sum(known_blocks(trace)) / sum(len(asked.hash_ids) for asked in trace)


def known_blocks(trace: list[Asked]) -> list[int]:
    """Of each request, how many of its first blocks came before."""
    seen: set[int] = set()
    found: list[int] = []
    for asked in trace:
        found.append(next((n for n, one in enumerate(asked.hash_ids) if one not in seen), len(asked.hash_ids)))
        seen.update(asked.hash_ids)
    return found


def bookkeeping(trace: list[Asked], pool_blocks: int) -> float:
    """Share of blocks found, one request after the other. One token stands for a block: only digests count here."""
    scheduler = StepScheduler(BlockPool(pool_blocks), 1, b"bench", StepLimits(1, 1_000_000))
    found = total = 0
    for ticket, asked in enumerate(trace):
        sequence = Sequence(ticket, [*asked.hash_ids, -1 - ticket], 1)
        scheduler.add(sequence)
        while sequence.computed < len(sequence.ids):
            scheduler.ran(scheduler.plan())
        scheduler.remove(sequence)
        found += sequence.reused
        total += len(asked.hash_ids)
    return found / total


def arrivals(trace: list[Asked], utilisation: float) -> dict[str, float]:
    """First tokens with sharing and without. A unit is the time of one computed token."""
    work = sum(BLOCK * len(asked.hash_ids) + 1 + STEP_COST for asked in trace)
    pace = work / utilisation / max(1.0, trace[-1].timestamp - trace[0].timestamp)
    chance = random.Random(3)
    ticks = [(asked.timestamp + chance.random() * TICK_MS) * pace for asked in trace]
    order = sorted(range(len(trace)), key=ticks.__getitem__)
    queue = [(ticks[number], trace[number]) for number in order]
    shared, plain = waits(queue, BlockPool(max(POOLS))), waits(queue, _Forgetful(max(POOLS)))
    found: dict[str, float] = {}
    for name, values in (("with", sorted(shared)), ("without", sorted(plain))):
        found |= {f"{name}_p{share}": round(values[len(values) * share // 100]) for share in (50, 90, 99)}
    return found | {"ratio_p50": round(found["without_p50"] / found["with_p50"], 2)}


TICK_MS = 3_000
"""How coarse the trace's clock is."""


class _Forgetful(BlockPool):
    """Finds nothing again."""

    def match(self, digests: Iterable[bytes]) -> list[int]:
        return []

    def has(self, digest: bytes) -> bool:
        return False


def waits(queue: list[tuple[float, Asked]], pool: BlockPool) -> list[float]:
    """From its arrival to its first token, of each request: (when it comes, which)."""
    scheduler = StepScheduler(pool, BLOCK, b"bench", StepLimits(32, 256))
    now = 0.0
    begun = 0
    found: list[float] = []
    while begun < len(queue) or not scheduler.idle:
        if scheduler.idle:
            now = max(now, queue[begun][0])
        while begun < len(queue) and queue[begun][0] <= now:
            ids = [number * BLOCK + place for number in queue[begun][1].hash_ids for place in range(BLOCK)]
            scheduler.add(Sequence(begun, [*ids, -1 - begun], 1))
            begun += 1
        chunks = scheduler.plan()
        now += STEP_COST + sum(chunk.count for chunk in chunks)
        scheduler.ran(chunks)
        for sequence in [chunk.sequence for chunk in chunks if chunk.chooses]:
            found.append(now - queue[sequence.ticket][0])
            scheduler.remove(sequence)
    return found


def conversations(trace: list[Asked], requests: int) -> list[Asked]:
    """All turns of some conversations in the order of the trace. The block after the system prompt names one."""
    by_talk: dict[int, list[int]] = {}
    for place, asked in enumerate(trace):
        if len(asked.hash_ids) > 1:
            by_talk.setdefault(asked.hash_ids[1], []).append(place)
    short = [places for places in by_talk.values() if all(len(trace[place].hash_ids) <= BLOCKS_MAX for place in places)]
    random.Random(2).shuffle(short)
    chosen: list[int] = []
    for places in short:
        if len(chosen) >= requests:
            break
        chosen += places
    return [trace[place] for place in sorted(chosen)]


def ask(model: DecoderModel, number: int, prompt: list[int]) -> Told:
    item = EngineInput(f"r{number}", b"{}", prompt, json.dumps({"max_tokens": 1}).encode())
    began = time.process_time()
    (answer,) = model.run([item])
    assert answer.first_token_ms is not None, answer.error_message
    return Told(answer.first_token_ms, 1_000 * (time.process_time() - began), answer.token_ids)


def serving(trace: list[Asked], kv_mb: int) -> dict[str, Any]:
    cached, plain = decoder(1, kv_mb=kv_mb), decoder(1, kv_mb=kv_mb)
    plain._scheduler._pool.match = lambda digests: []  # finds nothing
    both: list[tuple[Told, Told]] = []
    for model in (cached, plain):
        ask(model, -1, [50] * 20)
    before = cached.prompt_tokens, cached.reused_tokens
    for number, asked in enumerate(trace):
        prompt = tokens_of(asked.hash_ids)
        first, second = (plain, cached) if number % 2 else (cached, plain)
        told = {id(model): ask(model, number, prompt) for model in (first, second)}
        both.append((told[id(cached)], told[id(plain)]))
    prompt_tokens, reused = cached.prompt_tokens - before[0], cached.reused_tokens - before[1]
    blocks = sum(len(asked.hash_ids) for asked in trace)
    known = known_blocks(trace)
    whole = statistics.median(BLOCK * len(asked.hash_ids) + 1 for asked in trace)
    rest = statistics.median(BLOCK * (len(asked.hash_ids) - n) + 1 for asked, n in zip(trace, known, strict=True))
    followed = [pair for pair, n in zip(both, known, strict=True) if n > 1]
    return {
        "requests": len(trace),
        "prompt_tokens": prompt_tokens,
        "pool_blocks": cached._scheduler._pool.count,
        "hit_rate": round(reused / (BLOCK * blocks), 4),
        "upper_bound": round(bound(trace), 4),
        "tokens_p50": {"with": rest, "without": whole, "ratio": round(whole / rest, 2)},
        "all": figures(both),
        "later_turns": {"requests": len(followed), **figures(followed)},
        "answers_differ": sum(one[0].tokens != one[1].tokens for one in both),
    }


def figures(both: list[tuple[Told, Told]]) -> dict[str, Any]:
    """Medians of (with the cache, without)."""

    def p50(field: Literal["first_token_ms", "cpu_ms"]) -> dict[str, float]:
        cached, plain = (statistics.median(getattr(pair[place], field) for pair in both) for place in (0, 1))
        return {"with": round(cached, 1), "without": round(plain, 1), "ratio": round(plain / cached, 2)}

    cpu_s = [round(sum(pair[place].cpu_ms for pair in both) / 1_000, 1) for place in (0, 1)]
    return {
        "first_token_p50_ms": p50("first_token_ms"),
        "cpu_p50_ms": p50("cpu_ms"),
        "cpu_total_s": {"with": cpu_s[0], "without": cpu_s[1]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="kv_sharing", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=100, help="about so many are served")
    parser.add_argument("--kv-mb", type=int, default=512)
    parser.add_argument("--only", choices=("bookkeeping", "arrivals", "serving"))
    options = parser.parse_args()
    trace = trace_of(options.trace)
    report: dict[str, Any] = {"trace": options.trace.name if options.trace.exists() else "made up"}
    if options.only in (None, "bookkeeping"):
        rates = {str(size): round(bookkeeping(trace, size), 4) for size in POOLS}
        report["bookkeeping"] = {"requests": len(trace), "upper_bound": round(bound(trace), 4), "by_pool": rates}
    if options.only in (None, "arrivals"):
        report["arrivals"] = {str(load): arrivals(trace, load) for load in UTILISATIONS}
    if options.only in (None, "serving") and (SMOLLM2 / "build.json").exists():
        report["serving"] = serving(conversations(trace, options.requests), options.kv_mb)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
