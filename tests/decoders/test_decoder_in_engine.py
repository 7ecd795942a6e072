"""A decoder inside the engine process's loop: requests come over the socket while others run."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from gpu_worker.backends.base import ContinuousModel, EngineInput, EngineOutput, LoadedModel
from gpu_worker.backends.torch_backend import TorchBackend
from gpu_worker.edge.engine_process import EngineProcess
from gpu_worker.edge.message_socket import EngineSocket, PeerClosed
from gpu_worker.engine_messages import (
    Answers,
    Cancel,
    Delta,
    Deltas,
    FromEngine,
    Load,
    Loaded,
    NotLoaded,
    Raised,
    Run,
    Started,
    Stepped,
    ToEngine,
    Unload,
    decode_from_engine,
    encode_message,
)
from sie_stream.adapter_digests import own_and_base
from sie_stream.control import ModelLaunch
from sie_stream.edge.clock import SystemClock
from sie_stream.rollout_records import GoldenRequest
from tests.decoders.adapters import RANK, write_adapter
from tests.decoders.families import ask, save, with_tokenizer
from tests.libraries.backends.launching import launch
from tests.waiting import PATIENCE_S

SLOT = 3


class Engine:
    """The host's end of the socket; the engine's loop runs in a thread."""

    def __init__(self, backend: TorchBackend) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self.heard_early: list[FromEngine] = []
        self._end = EngineSocket(ours)
        ours.settimeout(PATIENCE_S)
        clock = SystemClock()
        self._thread = Thread(target=self._serve, args=(EngineProcess(backend, EngineSocket(theirs), clock),))
        self._thread.start()

    def _serve(self, engine: EngineProcess) -> None:
        with pytest.raises(PeerClosed):
            engine.serve()

    def tell(self, *messages: ToEngine) -> None:
        for message in messages:
            self._end.send(encode_message(message))

    def hear(self) -> FromEngine:
        """The next message that answers something."""
        if self.heard_early:
            return self.heard_early.pop(0)
        while isinstance(message := decode_from_engine(self._end.receive()), Stepped):
            pass
        return message

    def load(self, folder: Path, **config: Any) -> Loaded:
        settings = {"kind": "text_generation", "kv_mb": 4, "max_num_seqs": 4, **config}
        self.tell(Load(SLOT, msgspec.json.encode(launch(folder, "torch", settings))))
        loaded = self.hear()
        assert isinstance(loaded, Loaded), loaded
        return loaded

    def close(self) -> None:
        self._socket.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("talkative"), eos_token_id=None)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(TorchBackend(SystemClock()))
    assert isinstance(made.hear(), Started)
    yield made
    made.close()


def run(batch_id: int, *items: EngineInput) -> Run:
    return Run(batch_id, SLOT, list(items))


def test_requests_join_those_that_run_and_are_answered_as_they_end(engine: Engine, talkative: Path) -> None:
    assert engine.load(talkative).sequences_max == 4
    engine.tell(
        run(1, ask("long", [5], max_tokens=150)),
        run(2, ask("short", [5, 9], max_tokens=3)),
        run(3, ask("refused", [], max_tokens=1)),
    )
    heard = [engine.hear() for _ in range(3)]
    assert all(isinstance(message, Answers) for message in heard)
    by_batch = {message.batch_id: message for message in heard if isinstance(message, Answers)}
    assert [message.batch_id for message in heard if isinstance(message, Answers)][-1] == 1
    assert by_batch[1].outputs[0].completion_tokens == 150
    assert by_batch[2].outputs[0].completion_tokens == 3
    assert by_batch[3].outputs[0].error_code == "tokens_missing"
    first_token_ms = by_batch[1].outputs[0].first_token_ms
    assert first_token_ms is not None
    assert 0 < first_token_ms < by_batch[1].inference_ms


def test_a_decoder_tells_its_trunk_and_what_it_may_share(engine: Engine, talkative: Path) -> None:
    loaded = engine.load(talkative)
    assert loaded.trunk is not None
    assert loaded.trunk.precision == "float32, dense, fast"
    assert loaded.trunk.layout == "16 tokens x 3 layers x 2 heads x 8"
    tables = 160 * 8 * 4 * 2
    assert loaded.memory_bytes == sum(loaded.parts.values()) + tables


def test_answers_that_stream_are_told_of_before_they_end(engine: Engine, talkative: Path) -> None:
    engine.load(talkative)
    item = msgspec.structs.replace(ask("a", [5], max_tokens=150), stream=True)
    engine.tell(run(1, ask("quiet", [7], max_tokens=20)), run(2, ask("quiet too", [9], max_tokens=2), item))
    told: list[Delta] = []
    answers: dict[int, Answers] = {}
    while len(answers) < 2:
        message = engine.hear()
        assert isinstance(message, Deltas | Answers)
        if isinstance(message, Deltas):
            assert 2 not in answers
            told += message.deltas
        else:
            answers[message.batch_id] = message
    assert {(delta.batch_id, delta.place) for delta in told} == {(2, 1)}
    assert [token for delta in told for token in delta.token_ids] == answers[2].outputs[1].token_ids


def test_a_batch_of_several_is_answered_in_its_order_when_all_have_ended(engine: Engine, talkative: Path) -> None:
    engine.load(talkative)
    items = [ask(str(n), [5, 9 + n], max_tokens=9 - n) for n in range(6)]
    engine.tell(run(8, *items))
    answers = engine.hear()
    assert isinstance(answers, Answers)
    assert [one.request_id for one in answers.outputs] == [item.request_id for item in items]
    assert [one.completion_tokens for one in answers.outputs] == [9, 8, 7, 6, 5, 4]


def test_a_cancelled_request_is_answered_at_once_and_unloading_waits_for_the_others(
    engine: Engine, talkative: Path
) -> None:
    engine.load(talkative)
    engine.tell(run(1, ask("a", [5], max_tokens=150)), run(2, ask("b", [7], max_tokens=20)), Cancel(1), Unload(SLOT))
    heard = [engine.hear() for _ in range(2)]
    codes = {message.batch_id: message.outputs[0].error_code for message in heard if isinstance(message, Answers)}
    assert codes == {1: "cancelled", 2: None}
    engine.tell(run(3, ask("c", [5])))
    gone = engine.hear()
    assert isinstance(gone, Raised)
    assert "holds no model" in gone.message


class Fragile:
    """A decoder whose steps raise while a request called `bad` is in it. Implements ContinuousModel."""

    def __init__(self, model: LoadedModel) -> None:
        assert isinstance(model, ContinuousModel)
        self._model = model
        self._broken = False
        self.sequences_max = model.sequences_max
        self.memory_bytes = model.memory_bytes
        self.weights_digest = model.weights_digest
        self.run = model.run
        self.cancel = model.cancel
        self.deltas = model.deltas

    @property
    def busy(self) -> bool:
        return self._model.busy

    def submit(self, ticket: int, item: EngineInput) -> EngineOutput | None:
        self._broken = self._broken or item.request_id == "bad"
        return self._model.submit(ticket, item)

    def step(self) -> list[tuple[int, EngineOutput]]:
        if self._broken:
            raise RuntimeError("the device is gone")
        return self._model.step()

    def reset(self) -> list[int]:
        self._broken = False
        return self._model.reset()


class FragileBackend(TorchBackend):
    def load(self, launch: ModelLaunch) -> LoadedModel:
        return Fragile(super().load(launch))


class Recording(Fragile):
    """Remembers what it was asked by itself, and what it answered."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model)
        self.heard: list[EngineOutput] = []
        self.run = self._run

    def _run(self, batch: Sequence[EngineInput]) -> list[EngineOutput]:
        answers = self._model.run(batch)
        self.heard += answers
        return answers


class RecordingBackend(TorchBackend):
    def load(self, launch: ModelLaunch) -> LoadedModel:
        self.made = Recording(super().load(launch))
        return self.made


def test_a_warm_up_answers_a_few_tokens_and_a_golden_request_all(talkative: Path, tmp_path: Path) -> None:
    tokenizer = with_tokenizer(tmp_path) / "tokenizer.json"
    outputs = '{"finish_reason": "length", "text": "?"}'
    asked = msgspec.structs.replace(
        launch(talkative, "torch", {"kind": "text_generation", "kv_mb": 4, "max_tokens": 30}),
        tokenizer=str(tokenizer),
        pre_warmup=('{"prompt": "hello"}',),
        golden=(GoldenRequest('{"prompt": "hello"}', outputs),),
    )
    backend = RecordingBackend(SystemClock())
    engine = Engine(backend)
    assert isinstance(engine.hear(), Started)
    engine.tell(Load(SLOT, msgspec.json.encode(asked)))
    refused = engine.hear()
    assert isinstance(refused, NotLoaded)
    assert refused.code == "golden_mismatch"
    assert [answer.completion_tokens for answer in backend.made.heard] == [4, 30]
    engine.close()


def test_an_exception_in_a_step_is_told_for_all_that_shared_it_and_the_model_serves_on(talkative: Path) -> None:
    engine = Engine(FragileBackend(SystemClock()))
    assert isinstance(engine.hear(), Started)
    engine.load(talkative)
    engine.tell(run(1, ask("a", [5], max_tokens=150)), run(2, ask("bad", [7], max_tokens=150)))
    heard = [engine.hear() for _ in range(2)]
    told = {(message.batch_id, message.shared) for message in heard if isinstance(message, Raised)}
    assert told == {(1, 2), (2, 2)}
    engine.tell(run(3, ask("c", [5], max_tokens=2)))
    answer = engine.hear()
    assert isinstance(answer, Answers)
    assert answer.outputs[0].completion_tokens == 2
    engine.close()


def test_an_adapter_tells_the_host_its_trunk_and_why_it_was_refused(
    engine: Engine, talkative: Path, tmp_path: Path
) -> None:
    plain = engine.load(talkative)
    folder = write_adapter(tmp_path / "adapter", talkative, alora_invocation_tokens=[7, 8])
    loaded = engine.load(folder, base=str(talkative), lora_rank=RANK)
    assert plain.trunk is not None
    assert loaded.trunk is not None
    assert (loaded.trunk.opening, loaded.trunk.before) == (plain.trunk.digest, plain.trunk.digest)
    own, beneath = own_and_base(loaded.weights_digest)
    assert beneath == plain.weights_digest
    assert loaded.trunk.adapter == f"{own} from [7, 8] on"
    assert loaded.parts == plain.parts
    settings = {"kind": "text_generation", "base": str(talkative), "lora_rank": RANK + 1}
    engine.tell(Load(SLOT, msgspec.json.encode(launch(folder, "torch", settings))))
    refused = engine.hear()
    assert isinstance(refused, NotLoaded)
    assert f"lora.rank: {RANK + 1} is declared" in refused.message
