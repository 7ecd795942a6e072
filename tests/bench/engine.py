"""Our decoder against transformers' generate on SmolLM2, in one run: `python -m tests.bench.engine`.

Closed loop: at concurrency n, n requests of 128 prompt tokens and 64 answer tokens come at once. Figures depend on the
machine and on what else runs on it, so ratios within one run are what counts; the load is printed with them. On a busy
machine processor time says more than the clock: `--threads 1`, and the figures of tokens per second of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gpu_worker.backends.base import EngineInput
from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.torch_backend import TorchBackend
from sie_stream.control import ModelLaunch
from sie_stream.edge.clock import SystemClock

SMOLLM2 = Path(__file__).resolve().parents[2] / ".models" / "smollm2-135m-instruct"
PROMPT, ANSWER = 128, 64
CONCURRENCY = (1, 8, 32)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"precision": "int8"},
}
READ_BYTES = 512 * 1024 * 1024


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randint(100, 40_000, (PROMPT,), generator=generator).tolist() for _ in range(count)]


def decoder(threads: int, **config: Any) -> DecoderModel:
    settings = {
        "kind": "text_generation",
        "threads": threads,
        "max_num_seqs": max(CONCURRENCY),
        "kv_mb": 512,
        "context_tokens": 2048,
        **config,
    }
    launch = ModelLaunch("m", "1", "mi", "torch", str(SMOLLM2), "", settings, "text-generation", 1, 0, 8)
    model = TorchBackend(SystemClock()).load(launch)
    assert isinstance(model, DecoderModel)
    return model


def ours(model: DecoderModel, count: int) -> dict[str, float]:
    wanted = json.dumps({"max_tokens": ANSWER, "min_tokens": ANSWER}).encode()
    items = [EngineInput(str(n), b"{}", prompt, wanted) for n, prompt in enumerate(prompts(count))]
    started, cpu = time.perf_counter(), time.process_time()
    answers = model.run(items)
    took, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert all(answer.completion_tokens == ANSWER for answer in answers)
    return {
        "tokens_per_s": count * ANSWER / took,
        "tokens_per_core_s": count * ANSWER / cpu,
        "first_token_p50_ms": statistics.median(answer.first_token_ms or 0.0 for answer in answers),
    }


@torch.inference_mode()
def theirs(network: Any, count: int) -> dict[str, float]:
    ids = torch.tensor(prompts(count))
    mask = torch.ones_like(ids)

    def generate(tokens: int) -> float:
        started = time.perf_counter()
        network.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return time.perf_counter() - started

    cpu = time.process_time()
    took = generate(ANSWER)
    cpu = time.process_time() - cpu
    return {
        "tokens_per_s": count * ANSWER / took,
        "tokens_per_core_s": count * ANSWER / cpu,
        "first_token_p50_ms": 1000 * generate(1),
    }


def read_rate() -> float:
    """Bytes a second that the threads read from memory."""
    numbers = torch.ones(READ_BYTES // 4)
    numbers.sum()
    started = time.perf_counter()
    for _ in range(3):
        numbers.sum()
    return 3 * READ_BYTES / (time.perf_counter() - started)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    parser.add_argument(
        "--precision", nargs="+", choices=list(PRECISIONS), default=["fp32", "int8"], help="bf16 needs hardware for it"
    )
    options = parser.parse_args(arguments)
    threads = options.threads
    torch.set_num_threads(threads)
    rate = read_rate()
    found: dict[str, Any] = {"threads": threads, "read_gb_per_s": rate / 1e9, "load": os.getloadavg()}
    network: Any = AutoModelForCausalLM.from_pretrained(SMOLLM2, local_files_only=True, dtype=torch.float32).eval()
    models = {name: decoder(threads, **PRECISIONS[name]) for name in options.precision}
    for name, model in models.items():
        found[f"{name}_steps_per_s_by_memory"] = rate / model.memory_bytes
        ours(model, 1)
    for count in options.concurrency:
        row: dict[str, Any] = {"transformers": theirs(network, count)}
        for name, model in models.items():
            row[name] = ours(model, count)
            for unit in ("tokens_per_s", "tokens_per_core_s"):
                row[name][f"ratio_{unit}"] = row[name][unit] / row["transformers"][unit]
        found[f"concurrency_{count}"] = row
        print(json.dumps({"concurrency": count, **row}, default=float), file=sys.stderr, flush=True)
    found["load_after"] = os.getloadavg()
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
