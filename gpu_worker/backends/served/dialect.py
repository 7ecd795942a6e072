"""What vLLM and SGLang say differently, behind one interface."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from gpu_worker.backends.served.web import WebClient
from gpu_worker.decoding.parameters import Sampling


class Prompt(Struct, frozen=True):
    """One request, ready to be sent: exactly one of token_ids, text, messages."""

    request_id: str
    sampling: Sampling
    seed: int
    max_tokens: int
    token_ids: list[int] | None = None
    text: str | None = None
    messages: list[dict[str, str]] | None = None


class TokenLogprob(Struct, frozen=True):
    """A generated token, how likely it was, and the likeliest tokens of its place as (id, logprob)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Generated(Struct, frozen=True):
    token_ids: list[int] | None
    """Without the stop token; None when the server does not tell ids."""
    text: str
    finish_reason: str
    """`stop` or `length`."""
    prompt_tokens: int
    completion_tokens: int
    logprobs: list[TokenLogprob] | None = None


class Served(Struct, frozen=True):
    """A model as its server describes it."""

    name: str
    context_tokens: int
    version: str
    adapter: bool = False
    """A LoRA adapter on top of the server's model."""


class Dialect(Protocol):
    """One kind of server. Every method that asks the server raises a ServerFailure."""

    name: str
    least: str
    below: str
    """Versions that are spoken with: least <= version < below."""

    def command(self, program: str, source: str, name: str, port: int, sleeps: bool, adapters: bool) -> list[str]: ...

    def environment(self, sleeps: bool, adapters: bool) -> list[str]: ...

    def ready(self, web: WebClient) -> bool: ...

    def version(self, web: WebClient, timeout_s: float) -> str: ...

    def models(self, web: WebClient, timeout_s: float) -> dict[str, int]:
        """Names of the models and adapters it serves, with the context in tokens."""
        ...

    def generate(self, web: WebClient, served: Served, prompt: Prompt, timeout_s: float) -> Generated: ...

    def abort(self, web: WebClient, request_id: str, timeout_s: float) -> None:
        """End a request nobody waits for. Does nothing where closing the connection is enough."""
        ...

    def sleep(self, web: WebClient, timeout_s: float) -> None:
        """Give the device memory back and keep the process: the slot moves to the host."""
        ...

    def wake(self, web: WebClient, timeout_s: float) -> None: ...

    def load_adapter(self, web: WebClient, name: str, path: str, timeout_s: float) -> None: ...

    def unload_adapter(self, web: WebClient, name: str, timeout_s: float) -> None: ...
