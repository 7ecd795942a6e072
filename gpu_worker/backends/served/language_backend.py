"""Language models on servers of others (vLLM, SGLang): start or attach, sleep and wake, adapters.

`launch.source` is the model's folder, or an adapter's folder where `base` names the model. Models and adapters with the
same server options share one process. `launch.config`, besides what `options.py` says (`server` is a Python interpreter
that has the server installed):
  model           attach: its name on the server (default: the declaration's model name)
  base            folder of the base model; `source` is then a LoRA adapter for it. Attach: the adapter is loaded there
  max_tokens      answer length when a request names none (default 64)
  concurrency     requests at the server at once (default 64)
  sleep           true: an unloaded model keeps its process asleep, without device memory, and wakes for the next load
"""

from __future__ import annotations

import platform
import sys
import threading
from pathlib import Path

import httpx

from gpu_worker.backends.base import LoadedModel, ModelRefused
from gpu_worker.backends.served.dialect import Dialect, Served
from gpu_worker.backends.served.failures import ServerFailure
from gpu_worker.backends.served.identity import remote_identity
from gpu_worker.backends.served.language_model import Limits, ServedLanguageModel
from gpu_worker.backends.served.options import ServerOptions, positive, server_options, switch, text
from gpu_worker.backends.served.permission import permit
from gpu_worker.backends.served.process import ServerProcess, free_ports
from gpu_worker.backends.served.versions import require
from gpu_worker.backends.served.web import WebClient
from gpu_worker.backends.weights import verified_digest
from sie_stream.control import ModelLaunch
from sie_stream.errors import did_you_mean
from sie_stream.ports import Clock

OPTIONS = ("model", "base", "max_tokens", "concurrency", "sleep")
CONCURRENCY = 64
MAX_TOKENS = 64
Key = tuple[object, ...]


class _Server:
    """A server and how many slots use it."""

    def __init__(self, web: WebClient, process: ServerProcess | None, dialect: Dialect) -> None:
        self.web = web
        self.process = process
        self.users = 0
        self.asleep = False
        self.turn = threading.Lock()
        """Held while it falls asleep or wakes."""
        self._dialect = dialect

    def alive(self) -> bool:
        return (self.process is None or self.process.alive) and self._dialect.ready(self.web)

    def last_words(self) -> str:
        return self.process.last_words() if self.process is not None else ""

    def stop(self) -> None:
        self.web.close()
        if self.process is not None:
            self.process.close()


class _Slot:
    """Where a loaded model is."""

    def __init__(self, key: Key, server: _Server, adapter: str, sleeps: bool, timeout_ms: int) -> None:
        self.key = key
        self.server = server
        self.adapter = adapter
        self.sleeps = sleeps
        self.timeout_s = timeout_ms / 1000


class LanguageBackend:
    """Implements Backend for one dialect."""

    def __init__(self, dialect: Dialect, clock: Clock) -> None:
        self.name = dialect.name
        self._dialect = dialect
        self._clock = clock
        self._servers: dict[Key, _Server] = {}
        self._lock = threading.Lock()
        """Guards users and the registry: loads come from another thread than unloads."""
        self._slots: list[tuple[ServedLanguageModel, _Slot]] = []

    def load(self, launch: ModelLaunch) -> LoadedModel:
        """Raises ModelRefused, for a server that is not there or is of another version too."""
        options = server_options(launch.config, ("http", "https"), OPTIONS)
        base = text(launch.config, "base")
        digest = self._digest(launch, options)
        sleeps = switch(launch.config, "sleep")
        limits = Limits(
            options.timeout_ms,
            positive(launch.config, "max_tokens", MAX_TOKENS),
            positive(launch.config, "concurrency", CONCURRENCY),
        )
        where = text(launch.config, "model", launch.model)
        key = self._key(launch, options, base, sleeps)
        try:
            server = self._server(key, launch, options, base, sleeps)
            slot = _Slot(key, server, where if base else "", sleeps, options.timeout_ms)
            try:
                served = self._served(launch, slot, where)
            except (ServerFailure, ModelRefused):
                self._give_up_use(slot)
                raise
        except ServerFailure as failure:
            known = self._servers.get(key)
            words = known.last_words() if known is not None else ""
            message = f"{options.url or options.server}: {failure}. {words}".strip()
            raise ModelRefused(failure.code, message) from failure
        model = ServedLanguageModel(
            self._dialect,
            server.web,
            served,
            limits,
            launch.memory_bytes,
            digest or remote_identity("", f"{options.url}/{self.name}/{served.version}/{served.name}"),
            self._clock,
            server.alive,
            server.last_words,
        )
        self._slots.append((model, slot))
        return model

    def unload(self, model: LoadedModel) -> None:
        (slot,) = [slot for known, slot in self._slots if known is model]
        self._slots = [pair for pair in self._slots if pair[0] is not model]
        assert isinstance(model, ServedLanguageModel)
        model.close()
        try:
            self._leave(slot)
        except ServerFailure as failure:
            # The slot is free either way: a dead server holds nothing, and the next run notices its death.
            sys.stderr.write(f"engine {self.name}: unload of {model.served.name}: {failure}\n")

    def versions(self) -> dict[str, str]:
        return {"python": platform.python_version(), "httpx": httpx.__version__}

    def _digest(self, launch: ModelLaunch, options: ServerOptions) -> str:
        """Of the weights a started server reads, or of an adapter's; empty when only the attached server has them."""
        if options.server or text(launch.config, "base"):
            return verified_digest(Path(launch.source), launch.weights_digest)
        remote_identity(launch.weights_digest, options.url)
        return ""

    # ------------------------------------------------------------ servers

    def _key(self, launch: ModelLaunch, options: ServerOptions, base: str, sleeps: bool) -> Key:
        """Equal for slots that share a process."""
        if options.url:
            return (options.url,)
        weights = base or launch.source
        return (options.server, options.server_args, options.environment, weights, bool(base), sleeps)

    def _server(self, key: Key, launch: ModelLaunch, options: ServerOptions, base: str, sleeps: bool) -> _Server:
        """One more use of a server that runs, or of a new one. Only the loader's thread comes here."""
        with self._lock:
            known = self._servers.get(key)
            if known is not None:
                known.users += 1
        if known is not None and known.alive():
            try:
                self._wake(known, options.start_timeout_ms / 1000)
            except ServerFailure:
                with self._lock:
                    known.users -= 1
                raise
            return known
        if known is not None:
            self._drop(key, known)
        if not options.url:
            self._drop_sleepers()
        server = self._attached(options) if options.url else self._started(launch, options, base, sleeps)
        server.users = 1
        with self._lock:
            self._servers[key] = server
        return server

    def _drop(self, key: Key, server: _Server) -> None:
        with self._lock:
            if self._servers.get(key) is server:
                del self._servers[key]
        # Its connection stays: models that are loaded still have it, and end the engine when they notice.
        if server.process is not None:
            server.process.close()

    def _drop_sleepers(self) -> None:
        """A sleeping server keeps its weights in host memory; another start ends it."""
        for key, server in list(self._servers.items()):
            if server.asleep and server.process is not None:
                self._drop(key, server)

    def _attached(self, options: ServerOptions) -> _Server:
        server = _Server(WebClient(options.url), None, self._dialect)
        if not server.alive():
            server.stop()
            message = f"no {self.name} server is ready at {options.url}. Start it, or correct backend.config.url."
            raise ModelRefused("server_unreachable", message)
        return server

    def _started(self, launch: ModelLaunch, options: ServerOptions, base: str, sleeps: bool) -> _Server:
        permit(options.server)
        (port,) = free_ports(1)
        name = "base" if base else launch.model
        weights = base or launch.source
        command = self._dialect.command(options.server, weights, name, port, sleeps, bool(base))
        environment = [*self._dialect.environment(sleeps, bool(base)), *options.environment]
        process = ServerProcess(self.name, [*command, *options.server_args], environment)
        server = _Server(WebClient(f"http://127.0.0.1:{port}"), process, self._dialect)
        process.wait_ready(server.alive, options.start_timeout_ms, self._clock)
        return server

    # ------------------------------------------------------------ slots

    def _served(self, launch: ModelLaunch, slot: _Slot, where: str) -> Served:
        web = slot.server.web
        version = self._dialect.version(web, slot.timeout_s)
        require(self.name, version, self._dialect.least, self._dialect.below)
        if slot.adapter:
            self._dialect.load_adapter(web, slot.adapter, launch.source, slot.timeout_s)
        known = self._dialect.models(web, slot.timeout_s)
        if where not in known and not slot.adapter:
            guess = did_you_mean(where, known)
            raise ModelRefused(
                "model_not_ready",
                f"the {self.name} server has no model {where!r}, only {', '.join(known) or 'none'}.{guess} Correct "
                "backend.config.model.",
            )
        return Served(where, known.get(where) or max(known.values(), default=0), version, bool(slot.adapter))

    def _leave(self, slot: _Slot) -> None:
        """Give up one use. The last one ends a server of ours, or puts it to sleep where that is declared."""
        try:
            if slot.adapter:
                self._dialect.unload_adapter(slot.server.web, slot.adapter, slot.timeout_s)
        finally:
            self._give_up_use(slot)

    def _give_up_use(self, slot: _Slot) -> None:
        server = slot.server
        with self._lock:
            server.users -= 1
            if server.users:
                return
            sleeps = slot.sleeps and server.alive()
            if not sleeps and server.process is not None:
                self._servers.pop(slot.key, None)
        if sleeps:
            self._sleep(server, slot.timeout_s)
        elif server.process is not None:
            server.stop()

    def _sleep(self, server: _Server, timeout_s: float) -> None:
        with server.turn:
            if not server.users and not server.asleep:
                self._dialect.sleep(server.web, timeout_s)
                server.asleep = True

    def _wake(self, server: _Server, timeout_s: float) -> None:
        with server.turn:
            if server.asleep:
                self._dialect.wake(server.web, timeout_s)
                server.asleep = False
