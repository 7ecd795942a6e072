"""Models on vLLM: its OpenAI-compatible server, started here or attached to. See served/language_backend.py."""

from __future__ import annotations

from gpu_worker.backends.served.language_backend import LanguageBackend
from gpu_worker.backends.served.vllm import VllmDialect
from sie_stream.ports import Clock


class VllmBackend(LanguageBackend):
    def __init__(self, clock: Clock) -> None:
        super().__init__(VllmDialect(), clock)
