"""vLLM's own server on the CPU, with the real SmolLM2."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.served.failures import ServerDied
from gpu_worker.backends.served.language_model import ServedLanguageModel
from gpu_worker.backends.vllm_backend import VllmBackend
from sie_stream.edge.clock import SystemClock
from tests.backends_real.environments import START_TIMEOUT_MS, interpreter
from tests.backends_real.language import check_adapters, check_answers, check_seeds
from tests.libraries.backends.launching import launch, row
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(1_800)


def options() -> dict[str, Any]:
    return {
        "server": str(interpreter("vllm")),
        "server_args": [
            "--dtype",
            "float32",
            "--max-model-len",
            "1024",
            "--max-num-seqs",
            "8",
            "--enforce-eager",
            *("--enable-lora", "--max-lora-rank", "8"),
        ],
        "environment": ["VLLM_CPU_KVCACHE_SPACE=1", "VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"],
        "start_timeout_ms": START_TIMEOUT_MS,
        "timeout_ms": 300_000,
    }


def test_the_life_of_a_vllm_server(smollm2: Path, tmp_path: Path) -> None:
    """One start for all, since it takes so long."""
    backend = VllmBackend(SystemClock())
    model = backend.load(launch(smollm2, "vllm", options()))
    assert isinstance(model, ServedLanguageModel)
    check_answers(model, smollm2)
    check_seeds(model, smollm2)
    assert model.metrics()["vllm:generation_tokens_total"] > 0

    check_adapters(VllmBackend(SystemClock()), model.url, smollm2, tmp_path)

    attached = VllmBackend(SystemClock())
    with pytest.raises(ModelRefused, match="has no model 'm2'") as refusal:
        attached.load(launch(smollm2, "vllm", {"url": model.url, "model": "m2"}))
    assert refusal.value.code == "model_not_ready"

    sleeper = {"url": model.url, "sleep": True, "timeout_ms": 60_000}
    attached.unload(attached.load(launch(smollm2, "vllm", sleeper)))
    (again,) = attached.load(launch(smollm2, "vllm", sleeper)).run([row("r", {}, token_ids=[504, 3575])])
    assert again.error_code is None, "woken"

    below = psutil.Process().children(recursive=True)
    (server,) = [
        one for one in below if "vllm.entrypoints.openai.api_server" in one.cmdline() and "-S" not in one.cmdline()
    ]
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not any(one.is_running() for one in below), "the server, its engine core and its guard to end")
    with pytest.raises(ServerDied):
        model.run([row("r", {}, token_ids=[1, 2, 3])])
    backend.unload(model)
