"""Options in `launch.config` of models that another server runs, checked when a model is loaded.

Every such backend knows these:
  url               attach: where the server is. It is never started, stopped or restarted from here.
  server            launch: the program that serves; it runs on loopback, on ports chosen here, and ends with the engine
  server_args       launch: more arguments for it
  environment       launch: NAME=value, more variables for it
  start_timeout_ms  launch: longest time until it is ready (default 120,000)
  timeout_ms        longest time one answer may take (default 30,000)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from gpu_worker.backends.base import ModelRefused
from sie_stream.errors import did_you_mean

COMMON = ("url", "server", "server_args", "environment", "start_timeout_ms", "timeout_ms")


class ServerOptions(Struct, frozen=True):
    """The checked form of the options every backend knows. Exactly one of `url` and `server` is set."""

    url: str
    server: str
    server_args: tuple[str, ...]
    environment: tuple[str, ...]
    start_timeout_ms: int
    timeout_ms: int


def refused(key: str, message: str) -> ModelRefused:
    return ModelRefused("invalid_model_config", f"backend.config.{key}: {message}")


def server_options(
    config: Mapping[str, object], schemes: tuple[str, ...], more: Iterable[str], server: str = ""
) -> ServerOptions:
    """Check the common options. Raises ModelRefused that names the key and what is allowed.

    `more`: the backend's own keys. `server`: the program to start when neither it nor a url is named.
    """
    known = (*COMMON, *more)
    for key in config:
        if key not in known:
            raise refused(key, f"is no option of this backend.{did_you_mean(key, known)} Known: {', '.join(known)}.")
    url, program = text(config, "url"), text(config, "server")
    if url and program:
        raise refused("url", "names a server to attach to, and `server` one to start; give one of them.")
    program = program or ("" if url else server)
    if not url and not program:
        raise refused("url", "needs the address of a running server, or `server` the program to start.")
    if url and not url.startswith(tuple(f"{scheme}://" for scheme in schemes)):
        raise refused("url", f"{url!r} does not start with {' or '.join(f'{scheme}://' for scheme in schemes)}.")
    environment = names(config, "environment")
    for pair in environment:
        if not pair.partition("=")[0] or "=" not in pair:
            raise refused("environment", f"{pair!r} is not NAME=value.")
    return ServerOptions(
        url=url.rstrip("/"),
        server=program,
        server_args=names(config, "server_args"),
        environment=environment,
        start_timeout_ms=positive(config, "start_timeout_ms", 120_000),
        timeout_ms=positive(config, "timeout_ms", 30_000),
    )


def text(config: Mapping[str, object], key: str, default: str = "") -> str:
    value = config.get(key) or default
    if not isinstance(value, str):
        raise refused(key, f"{value!r} is not a text.")
    return value


def names(config: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = config.get(key) or []
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise refused(key, f"{value!r} is not a list of texts.")
    return tuple(value)


def positive(config: Mapping[str, object], key: str, default: int) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refused(key, f"{value!r} is not a whole number >= 1.")
    return value


def switch(config: Mapping[str, object], key: str) -> bool:
    value = config.get(key) or False
    if not isinstance(value, bool):
        raise refused(key, f"{value!r} is neither true nor false.")
    return value


def choice(config: Mapping[str, object], key: str, allowed: tuple[str, ...]) -> str:
    """One of `allowed`, the first being the default."""
    value = text(config, key, allowed[0])
    if value not in allowed:
        raise refused(key, f"{value!r} is not one of {', '.join(allowed)}.{did_you_mean(value, allowed)}")
    return value
