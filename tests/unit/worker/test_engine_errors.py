"""What an engine process says of the errors of a backend: all of it, or nothing that a protected input is in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from socket import socketpair
from threading import Thread

import msgspec
import pytest
from msgspec import Raw

from gpu_worker.backends.base import Backend, EngineInput, EngineOutput
from gpu_worker.edge.continuous import ContinuousRuns
from gpu_worker.edge.engine_process import EngineProcess
from gpu_worker.edge.message_socket import EngineSocket, PeerClosed
from gpu_worker.engine_messages import (
    FromEngine,
    Load,
    Loaded,
    Raised,
    Run,
    Started,
    decode_from_engine,
    encode_message,
)
from sie_stream.control import ModelLaunch
from sie_stream.edge.clock import SystemClock
from sie_stream.privacy.rules import WITHHELD
from tests.unit.privacy.kit import INPUTS
from tests.unit.worker.rig import launch_of

ADA = b'{"customer":"Ada Lovelace"}'


@dataclass
class Clumsy:
    """A model that raises whatever it is given, at once or when it is asked to step."""

    memory_bytes: int = 1
    weights_digest: str = "w"

    def run(self, items: Sequence[EngineInput]) -> list[EngineOutput]:
        raise ValueError(items[0].inputs.decode())


@dataclass
class ClumsyContinuous(Clumsy):
    sequences_max: int = 2
    busy: bool = False
    deltas: list[str] = field(default_factory=list)

    def submit(self, ticket: int, item: EngineInput) -> EngineOutput | None:
        raise ValueError(item.inputs.decode())

    def reset(self) -> None:
        self.busy = False


class ClumsyBackend:
    def versions(self) -> dict[str, str]:
        return {}

    def load(self, launch: ModelLaunch) -> Clumsy:
        return Clumsy()


def talk(launch: ModelLaunch) -> list[FromEngine]:
    """What the host hears after a load and a batch."""
    ours, theirs = socketpair()
    host, engine = EngineSocket(ours), EngineSocket(theirs)
    backend: Backend = ClumsyBackend()  # type: ignore[assignment]

    def serve() -> None:
        try:
            EngineProcess(backend, engine, SystemClock()).serve()
        except PeerClosed:
            theirs.close()

    thread = Thread(target=serve)
    thread.start()
    heard = [decode_from_engine(host.receive())]
    for message in (Load(1, msgspec.json.encode(launch)), Run(1, 1, [EngineInput("r", ADA)])):
        host.send(encode_message(message))
        heard.append(decode_from_engine(host.receive()))
    ours.close()
    thread.join()
    return heard


@pytest.mark.parametrize("marked", [True, False])
def test_words_that_may_repeat_protected_inputs_are_neither_logged_nor_told(
    marked: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    launch = launch_of("m", input_schema=Raw(json.dumps(INPUTS).encode())) if marked else launch_of("m")
    started, loaded, raised = talk(launch)
    assert isinstance(started, Started)
    assert isinstance(loaded, Loaded)
    assert isinstance(raised, Raised)
    logged = capfd.readouterr().err
    assert "in run" in logged  # where it was raised
    assert "ValueError" in logged
    assert ("Lovelace" in logged, "Lovelace" in raised.message) == (not marked, not marked)
    if marked:
        assert raised.message == f"ValueError: {WITHHELD}"


def test_a_continuous_model_is_told_of_by_the_same_rule() -> None:
    heard: list[FromEngine] = []
    backend: Backend = ClumsyBackend()  # type: ignore[assignment]
    runs = ContinuousRuns(
        lambda _, model: backend.unload(model),
        heard.append,
        lambda slot, error: f"{slot}: {type(error).__name__}",
        SystemClock(),
    )
    runs.run(Run(1, 7, [EngineInput("r", ADA)]), ClumsyContinuous())  # type: ignore[arg-type]
    [raised] = heard
    assert isinstance(raised, Raised)
    assert raised.message == "7: ValueError"
