"""Inputs of a replay whose engine raises, dies or cannot load: every one is answered, and its neighbours well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gpu_worker.backends.base import EngineInput, EngineOutput
from gpu_worker.sim.engine import EngineScript, SimEngines
from sie_stream.cli.replaying.engines import Engines, Target
from sie_stream.control import ModelLaunch
from sie_stream.edge.stop import StopFlag
from sie_stream.postprocess import build_outputs
from sie_stream.replay.versions import Unavailable


class Running:
    """A clock that goes on whenever somebody looks at it."""

    def __init__(self) -> None:
        self.at_ms = 0.0

    def now_ms(self) -> int:
        return int(self.at_ms)

    def monotonic_ms(self) -> float:
        self.at_ms += 1.0
        return self.at_ms


def launch(model: str = "m", version: str = "1") -> ModelLaunch:
    return ModelLaunch(model, version, "mi", "sim", "folder", "sha256:w", {}, "scoring", 1, 1, 4)


class World:
    def __init__(self, **script: object) -> None:
        self.answers: dict[str, EngineOutput] = {}
        self.links = SimEngines(Running(), EngineScript(**script))  # type: ignore[arg-type]
        self.waits: list[str] = []
        self.engines = Engines(self.links, 1_000_000, self.answered, StopFlag(), self.waiting)

    @contextmanager
    def waiting(self, launch: ModelLaunch) -> Iterator[None]:
        self.waits.append(f"{launch.model}@{launch.version}")
        yield
        self.waits.append("over")

    def answered(
        self, target: Target, tokens: Sequence[object], outputs: Sequence[EngineOutput], inference_ms: float
    ) -> None:
        for token, output in zip(tokens, outputs, strict=True):
            assert token == output.request_id
            assert output.request_id not in self.answers
            self.answers[output.request_id] = output

    def run(self, names: str, target: Target | Unavailable | None = None) -> None:
        found = target or self.engines.target(launch())
        assert isinstance(found, Target)
        for start in range(0, len(names), 4):
            part = names[start : start + 4]
            self.engines.submit(found, [EngineInput(name, b"{}") for name in part], list(part))
        self.engines.finish()

    def codes(self) -> dict[str, str | None]:
        return {name: answer.error_code for name, answer in sorted(self.answers.items())}


def test_a_loaded_version_says_what_provenance_says() -> None:
    world = World()
    target = world.engines.target(launch())
    assert isinstance(target, Target)
    assert (target.weights_digest, target.engine, target.batch_rows) == ("sha256:w", "sim (sim 1)", 4)
    assert world.engines.target(launch()) is target
    world.run("abcdefghij", target)
    assert world.codes() == dict.fromkeys("abcdefghij")


def test_tokens_of_a_pooled_model_become_text_here_for_no_egress_follows(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"yes": 0}, unk_token="yes")).save(str(file))
    pooled = msgspec.structs.replace(launch(), fusion="pooled", tokenizer=str(file))
    target = World().engines.target(pooled)
    assert isinstance(target, Target)
    assert target.launch.fusion == "pooled"
    assert build_outputs(target.stage2, None, [0], "stop") == b'{"text":"yes","finish_reason":"stop"}'


def test_an_exception_and_a_death_fail_the_one_that_caused_them() -> None:
    world = World(raises={"b"}, kills={"g"})
    world.run("abcdefghijklmnop")
    expected: dict[str, str | None] = dict.fromkeys("abcdefghijklmnop")
    assert world.codes() == expected | {"b": "engine_error", "g": "poison"}
    assert world.engines.deaths == 2  # in company, and alone


def test_a_version_that_cannot_be_loaded_is_told_and_the_others_go_on() -> None:
    world = World(refuses={"gone"}, kills_loading={"deadly"})
    for model, reason in (("gone", "digest_mismatch"), ("deadly", "died loading it")):
        found = world.engines.target(launch(model))
        assert isinstance(found, Unavailable)
        assert reason in found.reason
    world.run("abc")
    assert world.codes() == dict.fromkeys("abc")


def test_a_version_lost_with_its_engine_answers_with_the_reason() -> None:
    world = World()
    target = world.engines.target(launch())
    assert isinstance(target, Target)
    world.links.script.kills_loading.add("m")
    world.links.kill(target.key)
    world.run("abcdefgh", target)
    assert set(world.codes().values()) == {"engine_unavailable"}
    assert isinstance(world.engines.target(launch()), Unavailable)


def test_unloading_makes_room_and_loads_again_when_asked() -> None:
    world = World()
    first = world.engines.target(launch())
    world.engines.unload_all()
    second = world.engines.target(msgspec.structs.replace(launch(), version="2"))
    assert isinstance(first, Target)
    assert isinstance(second, Target)
    assert first.slot != second.slot
    world.run("ab", second)
    assert world.codes() == dict.fromkeys("ab")


def test_each_wait_for_an_engine_is_told_once_and_one_that_is_ready_is_not_waited_for() -> None:
    world = World(refuses={"gone"})
    world.engines.target(launch())
    world.engines.target(launch())
    world.engines.target(launch("gone"))
    assert world.waits == ["m@1", "over", "gone@1", "over"]
