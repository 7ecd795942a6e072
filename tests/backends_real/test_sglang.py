"""SGLang's own server on the CPU, with the real SmolLM2."""

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
from gpu_worker.backends.sglang_backend import SglangBackend
from sie_stream.edge.clock import SystemClock
from tests.backends_real.environments import START_TIMEOUT_MS, interpreter
from tests.backends_real.language import check_answers
from tests.libraries.backends.launching import launch, row
from tests.waiting import wait_until

SHIMS = Path(__file__).with_name("sglang_shims")
pytestmark = pytest.mark.timeout(1_800)


def options() -> dict[str, Any]:
    return {
        "server": str(interpreter("sglang")),
        "server_args": [
            *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
            *("--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "8192"),
            *("--max-running-requests", "8", "--mem-fraction-static", "0.2"),
        ],
        "environment": [f"PYTHONPATH={SHIMS}", "SGLANG_USE_CPU_ENGINE=1"],
        "start_timeout_ms": START_TIMEOUT_MS,
        "timeout_ms": 300_000,
    }


def test_the_life_of_an_sglang_server(smollm2: Path) -> None:
    """One start for all, since it takes so long. No adapters: SGLang's need pinned memory, which a CPU lacks."""
    backend = SglangBackend(SystemClock())
    model = backend.load(launch(smollm2, "sglang", options()))
    assert isinstance(model, ServedLanguageModel)
    check_answers(model, smollm2)
    assert model.metrics()["sglang:generation_tokens_total"] > 0

    attached = SglangBackend(SystemClock())
    with pytest.raises(ModelRefused, match="has no model 'm2'") as refusal:
        attached.load(launch(smollm2, "sglang", {"url": model.url, "model": "m2"}))
    assert refusal.value.code == "model_not_ready"

    below = psutil.Process().children(recursive=True)
    (server,) = [one for one in below if "sglang.launch_server" in one.cmdline() and "-S" not in one.cmdline()]
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not any(one.is_running() for one in below), "the server, its schedulers and its guard to end")
    with pytest.raises(ServerDied):
        model.run([row("r", {}, token_ids=[1, 2, 3])])
    backend.unload(model)
