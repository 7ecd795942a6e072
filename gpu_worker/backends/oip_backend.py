"""Models on Triton, or on any other server of the Open Inference Protocol v2, over HTTP or gRPC.

`launch.source` is the model's folder of a model repository (config.pbtxt and version folders); an attached server may
have it elsewhere, then `source` is only a name. Slots are the server's own: load and unload of its repository API.

`launch.config`, besides what `served/options.py` says:
  url            http://HOST:PORT or grpc://HOST:PORT of a running server
  server         path of tritonserver; one process serves all models of an engine with the same server options
  protocol       launch: http (default) | grpc
  model          its name on the server (default: name of the source folder); model_version: default the server's choice
  inputs         NAME, NAME:TYPE or NAME:TYPE:SIZES of one row; default: what the server says. Checked against it
  outputs        the same, of what is answered
  columns        tabular rows: fields of `inputs` that fill the (one) numeric input, in this order
  token_input    the input that is filled with the tokens of Stage 0
  bytes          utf8 (default) | base64: how texts of BYTES tensors are written in JSON
  batch_max      rows in one request, for a server that does not say (default: the declaration's)

Inputs are JSON by tensor name. An output of one element is a plain value, unless output_schema says `array`.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import grpc
import httpx

from gpu_worker.backends.base import LoadedModel, ModelRefused
from gpu_worker.backends.served.failures import ServerFailure
from gpu_worker.backends.served.identity import remote_identity, verified_tree
from gpu_worker.backends.served.oip import InferenceServer, ServerInfo
from gpu_worker.backends.served.oip_grpc import GrpcServer
from gpu_worker.backends.served.oip_http import HttpServer
from gpu_worker.backends.served.oip_model import OipModel, Place, row_plan
from gpu_worker.backends.served.options import ServerOptions, choice, refused, server_options, text
from gpu_worker.backends.served.permission import permit
from gpu_worker.backends.served.process import ServerProcess, free_ports
from sie_stream.control import ModelLaunch
from sie_stream.ports import Clock

OPTIONS = ("protocol", "model", "model_version", "inputs", "outputs", "columns", "token_input", "bytes", "batch_max")
UNLOAD_WAIT_MS = 5_000
UNLOAD_POLL_S = 0.05


class _Server:
    """A server of this engine process, and who uses which of its models."""

    def __init__(self, link: InferenceServer, process: ServerProcess | None, repository: Path | None) -> None:
        self.link = link
        self.process = process
        self.repository = repository
        self.users: dict[str, list[str]] = {}
        """Model on the server -> the sources it was loaded from, once for each slot."""
        self.ours: dict[str, None] = {}
        """Models that were loaded from here; others are left where they are."""
        self.turns: dict[str, threading.Lock] = {}
        """Model on the server -> held while it is loaded or unloaded: those come from two threads."""

    def last_words(self) -> str:
        return self.process.last_words() if self.process is not None else ""

    def alive(self) -> bool:
        return (self.process is None or self.process.alive) and self.link.live()

    def end(self) -> None:
        """Let go of it; a server that was started here ends."""
        self.link.close()
        if self.process is not None:
            self.process.close()
        if self.repository is not None:
            shutil.rmtree(self.repository, ignore_errors=True)


class OipBackend:
    """Serves models of other servers by the Open Inference Protocol. Registered as `triton`."""

    name = "triton"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._servers: dict[tuple[object, ...], _Server] = {}
        self._pause = threading.Event()

    def load(self, launch: ModelLaunch) -> LoadedModel:
        """Raises ModelRefused, for a server that is not there or does not do what is declared too."""
        options = server_options(launch.config, ("http", "https", "grpc"), OPTIONS)
        source = Path(launch.source)
        name = text(launch.config, "model", source.name)
        digest = verified_tree(source, launch.weights_digest) if options.server else ""
        server = self._server(options, choice(launch.config, "protocol", ("http", "grpc")))
        try:
            info = server.link.info(options.timeout_ms / 1000)
            digest = digest or remote_identity(
                launch.weights_digest, f"{options.url}/{info.name}/{info.version}/{name}"
            )
            try:
                self._occupy(server, info, options, name, source)
                return self._model(launch, options, server, info, name, digest)
            except (ServerFailure, ModelRefused):
                self._leave(server, name, str(source))
                raise
        except ServerFailure as failure:
            what = f"{options.url or options.server}: {failure}. {server.last_words()}".strip()
            raise ModelRefused(failure.code, what) from failure

    def unload(self, model: LoadedModel) -> None:
        assert isinstance(model, OipModel)
        for server in list(self._servers.values()):
            if server.link is model.link:
                try:
                    self._leave(server, model.place.name, model.place.source)
                except ServerFailure as failure:
                    # The slot is free either way: a dead server holds nothing, and the next run notices its death.
                    sys.stderr.write(f"engine triton: unload of {model.place.name}: {failure}\n")

    def close(self) -> None:
        """End the servers that were started here. A process that ends needs no call: they end with it."""
        for server in self._servers.values():
            server.end()
        self._servers.clear()

    def versions(self) -> dict[str, str]:
        return {"python": platform.python_version(), "httpx": httpx.__version__, "grpcio": grpc.__version__}

    # ------------------------------------------------------------ servers

    def _server(self, options: ServerOptions, protocol: str) -> _Server:
        key = (options.url, options.server, options.server_args, options.environment, protocol)
        known = self._servers.get(key)
        if known is not None and known.alive():
            return known
        if known is not None and known.process is not None:
            # Its connection stays: models that are loaded still have it, and end the engine when they notice.
            known.process.close()
        server = self._started(options, protocol) if options.server else _Server(_link(options.url), None, None)
        if not options.server and not server.link.ready():
            server.link.close()
            message = f"no server is ready at {options.url}. Start it, or correct backend.config.url."
            raise ModelRefused("server_unreachable", message)
        self._servers[key] = server
        return server

    def _started(self, options: ServerOptions, protocol: str) -> _Server:
        """A Triton of our own over an empty repository, into which models are linked as they are loaded."""
        permit(options.server)
        repository = Path(tempfile.mkdtemp(prefix="sie-triton-repository-"))
        http, rpc = free_ports(2)
        command = [
            options.server,
            f"--model-repository={repository}",
            *("--model-control-mode=explicit", "--allow-metrics=false", "--exit-timeout-secs=5"),
            *("--http-address=127.0.0.1", f"--http-port={http}", "--grpc-address=127.0.0.1", f"--grpc-port={rpc}"),
            *options.server_args,
        ]
        process = ServerProcess("triton", command, options.environment)
        link = _link(f"grpc://127.0.0.1:{rpc}" if protocol == "grpc" else f"http://127.0.0.1:{http}")
        process.wait_ready(link.ready, options.start_timeout_ms, self._clock)
        return _Server(link, process, repository)

    # ------------------------------------------------------------ slots

    def _occupy(self, server: _Server, info: ServerInfo, options: ServerOptions, name: str, source: Path) -> None:
        """Have the model loaded. Raises ModelRefused, ServerFailure."""
        with server.turns.setdefault(name, threading.Lock()):
            self._occupy_alone(server, info, options, name, source)

    def _occupy_alone(self, server: _Server, info: ServerInfo, options: ServerOptions, name: str, source: Path) -> None:
        users = server.users.setdefault(name, [])
        if users and str(source) not in users:
            raise ModelRefused(
                "model_name_taken",
                f"the server holds a model {name!r} from {users[0]} already; name the one from {source} otherwise "
                "(backend.config.model).",
            )
        if not users:
            if server.repository is not None:
                _link_model(server.repository / name, source)
            if info.manages_models and not (
                options.url and server.link.model_ready(name, "", options.timeout_ms / 1000)
            ):
                server.link.load(name, options.start_timeout_ms / 1000)
                server.ours[name] = None
            if not server.link.model_ready(name, "", options.timeout_ms / 1000):
                raise ModelRefused(
                    "model_not_ready",
                    f"the server {info.name} {info.version} has no model {name!r} that is ready. Put it into its "
                    "repository, or correct backend.config.model.",
                )
        users.append(str(source))

    def _leave(self, server: _Server, name: str, source: str) -> None:
        """Give up one use; the last one unloads the model, and waits (5 s) until the server has let it go."""
        with server.turns[name]:
            users = server.users.get(name, [])
            if source in users:
                users.remove(source)
            if users or name not in server.ours:
                return
            del server.ours[name]
            server.link.unload(name, UNLOAD_WAIT_MS / 1000)
            until = self._clock.monotonic_ms() + UNLOAD_WAIT_MS
            while server.link.states(UNLOAD_WAIT_MS / 1000).get(name) in ("READY", "UNLOADING"):
                if self._clock.monotonic_ms() > until or self._pause.wait(UNLOAD_POLL_S):
                    break
            if server.repository is not None:
                (server.repository / name).unlink(missing_ok=True)

    def _model(
        self, launch: ModelLaunch, options: ServerOptions, server: _Server, info: ServerInfo, name: str, digest: str
    ) -> OipModel:
        version = text(launch.config, "model_version")
        described = "model_configuration" in info.extensions
        found = server.link.model(name, version, options.timeout_ms / 1000, described)
        plan = row_plan(launch, found)
        place = Place(name, version, str(launch.source))
        return OipModel(
            server.link,
            place,
            plan,
            options.timeout_ms,
            launch.memory_bytes,
            digest,
            self._clock,
            server.alive,
            server.last_words,
        )


def _link(url: str) -> InferenceServer:
    scheme, _, address = url.partition("://")
    return GrpcServer(address) if scheme == "grpc" else HttpServer(url)


def _link_model(place: Path, source: Path) -> None:
    """Triton follows links, and takes the name of the folder for the model's."""
    if place.is_symlink():
        place.unlink()
    try:
        place.symlink_to(source.resolve(), target_is_directory=True)
    except OSError as error:
        raise refused("model", f"{place.name!r} cannot be the name of a folder: {error}") from error
