"""Models on SGLang's server, started here or attached to. See served/language_backend.py."""

from __future__ import annotations

from gpu_worker.backends.served.language_backend import LanguageBackend
from gpu_worker.backends.served.sglang import SglangDialect
from sie_stream.ports import Clock


class SglangBackend(LanguageBackend):
    def __init__(self, clock: Clock) -> None:
        super().__init__(SglangDialect(), clock)
