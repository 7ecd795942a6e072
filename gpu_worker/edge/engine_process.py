"""The engine process: one backend, its loaded models, and a socket to the host.

The main thread runs batches in the order they arrive, and between messages the steps of continuous models; a second
thread loads models meanwhile. The process dies with its
host: the kernel kills it (PR_SET_PDEATHSIG), and the end of the socket ends the loop.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from queue import SimpleQueue
from typing import NoReturn

import msgspec

from gpu_worker.backends.base import (
    Backend,
    ContinuousModel,
    EngineInput,
    EngineOutput,
    KeepsBlocks,
    LoadedModel,
    ModelRefused,
    MovableModel,
    OnTrunk,
    load_backend,
)
from gpu_worker.edge.continuous import ContinuousRuns
from gpu_worker.edge.engine_errors import Tell, shorten, tell_of
from gpu_worker.edge.engine_models import ArenaOption, EngineModels
from gpu_worker.edge.message_socket import EngineSocket, PeerClosed
from gpu_worker.edge.process_limits import apply_limits, out_of_memory
from gpu_worker.engine_messages import (
    Activate,
    Answers,
    Cancel,
    Deactivate,
    Export,
    FromEngine,
    Load,
    Loaded,
    MoveImage,
    NotLoaded,
    Raised,
    Run,
    Started,
    ToEngine,
    Unload,
    decode_to_engine,
    encode_message,
)
from gpu_worker.isolation import EngineLimits
from sie_stream.control import ModelLaunch
from sie_stream.edge.clock import SystemClock
from sie_stream.edge.tokenizer import shared_tokenizers
from sie_stream.errors import SieError
from sie_stream.golden import golden_differences
from sie_stream.postprocess import GeneratedText

PR_SET_PDEATHSIG = 1
OVER_LIMIT = (
    "the engine process may not take so much memory: declare min_gpu_memory_mb as it is, or give the device "
    "(cpu_memory_mb) or its engines (engine_memory_limit_mb) more."
)
SWITCH_INTERVAL_S = 0.001
"""A load must not hold a batch up for the default 5 ms at every step."""
WARM_UP_TOKENS = 4
"""A prompt and a few tokens touch all that the longest answer does."""


class _TextInputs(msgspec.Struct):
    """The inputs of language models and embedders, as far as a warm-up needs them."""

    prompt: str = ""
    text: str = ""
    messages: list[dict[str, str]] = msgspec.field(default_factory=list)


class EngineProcess:
    """Serves one socket until it closes."""

    def __init__(
        self,
        backend: Backend,
        end: EngineSocket,
        clock: SystemClock,
        arena: ArenaOption | None = None,
        load_nice: int = 0,
    ) -> None:
        """arena: None on a device without a budget. load_nice: see EngineLimits."""
        self._backend = backend
        self._socket = end
        self._clock = clock
        self._load_nice = load_nice
        self._models = EngineModels(
            backend, arena.arena() if arena else None, lambda message: self._send(encode_message(message)), clock
        )
        self._lock = threading.Lock()
        """Guards sending, and the hand-over of models between the two threads."""
        self._loads: SimpleQueue[Load] = SimpleQueue()
        self._loading: dict[int, None] = {}
        self._unwanted: dict[int, None] = {}
        self._tokenizers = shared_tokenizers()
        self._tell: dict[int, Tell] = {}
        """By slot, how errors of its model are told."""
        self._continuous = ContinuousRuns(
            self._models.unload,
            lambda message: self._send(encode_message(message)),
            lambda slot, error: self._tell[slot](error),
            clock,
        )

    def serve(self) -> None:
        # Libraries have version types of their own; only plain text crosses the socket.
        versions = {name: str(version) for name, version in self._backend.versions().items()}
        self._send(encode_message(Started(os.getpid(), versions)))
        threading.Thread(target=self._load_for_ever, name="loader", daemon=True).start()
        while True:
            if self._continuous.busy and not self._socket.readable():
                self._continuous.step()
            else:
                self._obey(decode_to_engine(self._socket.receive()))

    def _obey(self, message: ToEngine) -> None:
        match message:
            case Run():
                self._run(message)
            case Load():
                with self._lock:
                    self._loading[message.slot] = None
                self._loads.put(message)
            case Unload():
                self._unload(message.slot)
            case Cancel():
                self._continuous.cancel(message.batch_id)
            case Export():
                self._continuous.export(message)
            case Activate() | Deactivate() | MoveImage():
                self._models.obey(message)

    def _send(self, message: bytes) -> None:
        with self._lock:
            self._socket.send(message)

    def _run(self, message: Run) -> None:
        model = self._models.get(message.slot)
        if model is None:
            self._raised(message, f"slot {message.slot} holds no model")
            return
        if self._models.away(message.slot):
            self._raised(message, f"the model of slot {message.slot} is not on the device")
            return
        if isinstance(model, ContinuousModel):
            self._continuous.run(message, model)
            return
        started_at = self._clock.monotonic_ms()
        try:
            outputs = model.run(message.items)
            answer = encode_message(Answers(message.batch_id, outputs, self._clock.monotonic_ms() - started_at))
        except Exception as error:  # noqa: BLE001  # whatever a backend raises is an answer to the host
            self._raised(message, self._tell[message.slot](error))
            return
        if len(outputs) != len(message.items):
            self._raised(message, f"the backend answered {len(outputs)} of {len(message.items)} inputs")
            return
        self._send(answer)

    def _raised(self, message: Run, text: str) -> None:
        self._send(encode_message(Raised(message.batch_id, "engine_error", text)))

    def _unload(self, slot: int) -> None:
        with self._lock:
            if slot in self._loading:
                self._unwanted[slot] = None
                return
            model = self._models.pop(slot)
        if isinstance(model, ContinuousModel):
            self._continuous.unload(slot, model)
        elif model is not None:
            self._models.unload(slot, model)

    def _load_for_ever(self) -> None:
        os.nice(self._load_nice)  # of this thread alone
        while True:
            message = self._loads.get()
            try:
                answer = self._load(message)
            except SystemExit as end:  # a server of others died; from this thread, too, that ends the engine
                leave(end)
            with self._lock:
                del self._loading[message.slot]
                unwanted = message.slot in self._unwanted
                self._unwanted.pop(message.slot, None)
                model = self._models.pop(message.slot) if unwanted else None
            if model is not None:
                self._models.unload(message.slot, model)
            if not unwanted:
                try:
                    self._send(encode_message(answer))
                except PeerClosed:
                    return

    def _load(self, message: Load) -> FromEngine:
        started_at = self._clock.monotonic_ms()
        try:
            launch = msgspec.json.decode(message.launch, type=ModelLaunch)
            self._tell[message.slot] = tell_of(launch)
            model = self._backend.load(launch)
            loaded_at = self._clock.monotonic_ms()
            self._warm_up(launch, model)
            self._check_golden(launch, model)
            footprint = self._models.add(message.slot, model)
        except ModelRefused as refusal:
            return NotLoaded(message.slot, refusal.code, refusal.message)
        except Exception as error:  # noqa: BLE001  # whatever a backend raises is an answer to the host
            traceback.print_exc()
            if out_of_memory(error):
                return NotLoaded(message.slot, "out_of_memory", f"{OVER_LIMIT} {shorten(error)}")
            return NotLoaded(message.slot, "load_failed", shorten(error))
        return Loaded(
            message.slot,
            int(model.memory_bytes),
            str(model.weights_digest),
            round(loaded_at - started_at),
            round(self._clock.monotonic_ms() - loaded_at),
            model.sequences_max if isinstance(model, ContinuousModel) else 0,
            model.trunk if isinstance(model, OnTrunk) else None,
            model.parts if isinstance(model, OnTrunk) else {},
            *footprint,
            movable=isinstance(model, MovableModel),
        )

    def _warm_up(self, launch: ModelLaunch, model: LoadedModel) -> None:
        """Run the declared inputs once, for short answers. Raises ModelRefused when one of them fails."""
        parameters = b'{"max_tokens":%d}' % WARM_UP_TOKENS if isinstance(model, ContinuousModel) else None
        for number, inputs in enumerate(launch.pre_warmup):
            item = EngineInput(f"warmup-{number}", inputs.encode(), self._tokens(launch, inputs), parameters)
            for answer in model.run([item]):
                if answer.error_code is not None:
                    text = f"pre_warmup[{number}] of {launch.model}: {answer.error_code}: {answer.error_message}"
                    raise ModelRefused("warmup_failed", text)

    def _check_golden(self, launch: ModelLaunch, model: LoadedModel) -> None:
        """Raises ModelRefused naming the first golden request that is not answered as declared, and how it differs."""
        for number, golden in enumerate(launch.golden):
            item = EngineInput(f"golden-{number}", golden.inputs.encode(), self._tokens(launch, golden.inputs))
            [answer] = model.run([item])
            found: tuple[str, ...] = (f"{answer.error_code}: {answer.error_message}",)
            if answer.error_code is None:
                outputs = self._outputs(launch, answer)
                found = golden_differences(golden.outputs.encode(), outputs, golden.tolerance)
            if found:
                raise ModelRefused("golden_mismatch", f"golden[{number}] of {launch.model}: {'; '.join(found)}")

    def _outputs(self, launch: ModelLaunch, answer: EngineOutput) -> bytes:
        """As Stage 2 would finish it."""
        if answer.outputs is not None or answer.token_ids is None or not launch.tokenizer:
            return answer.outputs or b"{}"
        text = self._tokenizers.get(launch.tokenizer).decode(answer.token_ids)
        return msgspec.json.encode(GeneratedText(text, answer.finish_reason or ""))

    def _tokens(self, launch: ModelLaunch, inputs: str) -> list[int] | None:
        """What Stage 0 would have made of a warm-up input."""
        if not launch.tokenizer:
            return None
        tokenizer = self._tokenizers.get(launch.tokenizer)
        parsed = msgspec.json.decode(inputs, type=_TextInputs)
        if parsed.messages:
            return tokenizer.encode_plain(tokenizer.render_chat(parsed.messages))
        return tokenizer.encode(parsed.prompt or parsed.text)


def leave(end: SystemExit) -> NoReturn:
    """Now: threads of a pool may wait for a server that does not answer, and an ordinary exit would wait for them."""
    sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else 1)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)  # it ended before we could ask


def imported(backend: str, clock: SystemClock, nice: int) -> Backend:
    """The backend, imported at that niceness. Linux has it per thread, and nobody may take it back: so one thread is
    made for it. Only where it is asked for: libraries that set signal handlers must be imported by the main thread.
    """
    if nice == 0:
        return load_backend(backend, clock)
    with ThreadPoolExecutor(1, initializer=os.nice, initargs=(nice,)) as thread:
        return thread.submit(load_backend, backend, clock).result()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engine_process")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the host")
    parser.add_argument("--parent", type=int, required=True, help="process id of the host")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--kv-tier", type=int, default=-1, help="inherited memory that outlives this process")
    parser.add_argument("--limits", default="{}", help="EngineLimits as JSON")
    parser.add_argument("--arena", default="null", help="ArenaOption as JSON; null: the device has no budget")
    options = parser.parse_args(arguments)
    die_with_parent(options.parent)
    limits = msgspec.json.decode(options.limits, type=EngineLimits)
    apply_limits(limits)
    # A terminal's Ctrl-C and a supervisor's SIGTERM are for the host, which still needs us to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    clock = SystemClock()
    end = EngineSocket(socket.socket(fileno=options.fd))
    try:
        backend = imported(options.backend, clock, limits.load_nice)
        if options.kv_tier >= 0 and isinstance(backend, KeepsBlocks):
            backend.keep_in(memoryview(mmap(options.kv_tier, 0)))
        arena = msgspec.json.decode(options.arena, type=ArenaOption | None)
        EngineProcess(backend, end, clock, arena, limits.load_nice).serve()
    except PeerClosed:
        return 0
    except SieError as error:
        sys.stderr.write(f"engine {options.backend}: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main()
    except SystemExit as end:
        leave(end)
    except Exception:  # noqa: BLE001  # outermost frame
        traceback.print_exc()
    # The loader thread may be deep inside a library, and libraries may take seconds to tidy up: wait for neither.
    sys.stderr.flush()
    os._exit(code)
