"""Real engine processes with a backend that misbehaves on request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_worker.backends.base import EngineInput
from gpu_worker.edge.engine_link import EngineLinks
from gpu_worker.engine_port import (
    BatchCompleted,
    BatchFailed,
    EngineDied,
    EngineEvent,
    EngineKey,
    EngineStarted,
    LoadFailed,
    ModelLoaded,
)
from sie_stream.control import ModelLaunch
from tests.unit.worker.rig import launch_of
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
PACKAGE = Path(__file__).parents[1] / "unit" / "worker" / "backend_package"
KEY = EngineKey("cpu:0", "trouble")


class Engines:
    """The links and everything they said."""

    def __init__(self, **more: Any) -> None:
        path = os.pathsep.join([str(PACKAGE), str(ROOT)])
        self.links = EngineLinks(3, environment={"PYTHONPATH": path}, **more)
        self.said: list[EngineEvent] = []

    def load(self, slot: int = 1, **changes: object) -> None:
        self.links.load(KEY, slot, trouble(**changes))

    def run(self, batch_id: int, *inputs: str, slot: int = 1) -> None:
        items = [EngineInput(f"{batch_id}-{number}", text.encode()) for number, text in enumerate(inputs)]
        self.links.submit(KEY, batch_id, slot, items)

    def wait_for(self, kind: type[EngineEvent], count: int = 1) -> EngineEvent:
        def found() -> list[EngineEvent]:
            self.said.extend(self.links.poll(20))
            matching = [event for event in self.said if isinstance(event, kind)]
            return matching if len(matching) >= count else []

        return wait_until(found, f"{count} x {kind.__name__}")[count - 1]


def trouble(**changes: object) -> ModelLaunch:
    return launch_of("m", backend="trouble", **changes)


@pytest.fixture
def engines() -> Iterator[Engines]:
    made = Engines()
    yield made
    pids = list(made.links.pids().values())
    made.links.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_loads_and_answers_in_order(engines: Engines) -> None:
    engines.load(pre_warmup=('{"a":1}',))
    loaded = engines.wait_for(ModelLoaded)
    assert isinstance(loaded, ModelLoaded)
    assert (loaded.slot, loaded.memory_bytes, loaded.weights_digest) == (1, 1234, "sha256:trouble")
    started = engines.wait_for(EngineStarted)
    assert isinstance(started, EngineStarted)
    assert started.versions == {"trouble": "1.0"}
    engines.run(7, '{"x":1}', '{"do":"refuse"}', '{"x":3}')
    done = engines.wait_for(BatchCompleted)
    assert isinstance(done, BatchCompleted)
    assert done.batch_id == 7
    assert [one.request_id for one in done.outputs] == ["7-0", "7-1", "7-2"]
    assert [one.outputs for one in done.outputs] == [b'{"x":1}', None, b'{"x":3}']
    assert done.outputs[1].error_code == "refused"


def test_an_engine_that_was_started_before_takes_the_first_model(engines: Engines) -> None:
    engines.links.start(KEY)
    started = engines.wait_for(EngineStarted)
    assert isinstance(started, EngineStarted)
    engines.load()
    engines.wait_for(ModelLoaded)
    assert engines.links.pids() == {KEY: started.pid}


def children() -> set[int]:
    """Engines that live; those that ended and were not waited for are none."""
    return {one.pid for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE}


def test_a_spare_takes_over_from_an_engine_that_was_killed() -> None:
    before = children()
    engines = Engines(spares=["trouble"])
    engines.load()
    engines.wait_for(ModelLoaded)
    first = engines.links.pids()[KEY]
    (spare,) = children() - before - {first}
    os.kill(first, signal.SIGKILL)
    died = engines.wait_for(EngineDied)
    assert isinstance(died, EngineDied)
    assert died.cause == "SIGKILL"
    engines.load(slot=2)
    engines.wait_for(ModelLoaded, 2)
    assert engines.links.pids() == {KEY: spare}
    engines.run(2, '{"x":1}', slot=2)
    engines.wait_for(BatchCompleted)
    assert len(children() - before) == 2, "it has a spare of its own"
    engines.links.stop(KEY)
    wait_until(lambda: not children() - before, "an engine that is not wanted any more leaves no spare")
    engines.links.close()


def test_a_spare_that_ended_takes_nothing_over() -> None:
    before = children()
    engines = Engines(spares=["trouble"])
    engines.load()
    engines.wait_for(ModelLoaded)
    first = engines.links.pids()[KEY]
    (spare,) = children() - before - {first}
    for pid in (spare, first):
        os.kill(pid, signal.SIGKILL)
    engines.wait_for(EngineDied)
    wait_until(lambda: psutil.Process(spare).status() == psutil.STATUS_ZOMBIE, "the end of the spare")
    engines.load(slot=2)
    engines.wait_for(ModelLoaded, 2)
    assert sum(isinstance(event, EngineDied) for event in engines.said) == 1
    engines.links.close()


def test_a_model_that_is_asked_for_while_an_end_is_still_to_be_told_starts_nothing(engines: Engines) -> None:
    engines.load()
    engines.wait_for(ModelLoaded)
    os.kill(engines.links.pids()[KEY], signal.SIGKILL)
    wait_until(lambda: (engines.links.unload(KEY, 1), not engines.links.pids())[1], "the end noticed while telling")
    engines.load(slot=2)
    assert not engines.links.pids()
    engines.wait_for(EngineDied)
    engines.load(slot=2)
    engines.wait_for(ModelLoaded, 2)


def test_memory_that_outlives_the_engine_is_inherited_and_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    engines = Engines(kv_tier_bytes=1 << 20)
    engines.load()
    engines.wait_for(ModelLoaded)
    named = [os.readlink(file) for file in Path(f"/proc/{engines.links.pids()[KEY]}/fd").iterdir()]
    assert any("sie-kv" in name for name in named)
    engines.links.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_terminals_ctrl_c_does_not_reach_an_engine_that_still_imports(engines: Engines) -> None:
    engines.load()
    pid = engines.links.pids()[KEY]
    assert os.getpgid(pid) == pid, "a terminal interrupts its foreground group, and nothing there is ignored yet"
    engines.wait_for(ModelLoaded)


def test_threads_are_set_before_the_start(engines: Engines) -> None:
    engines.load()
    engines.wait_for(ModelLoaded)
    engines.run(1, '{"do":"environment","name":"OMP_NUM_THREADS"}')
    done = engines.wait_for(BatchCompleted)
    assert isinstance(done, BatchCompleted)
    assert done.outputs[0].outputs == b'{"value":"3"}'


@pytest.mark.parametrize(("what", "cause"), [("segfault", "SIGSEGV"), ("exit", "exit 3")])
def test_the_end_of_a_process_is_told_with_its_cause(engines: Engines, what: str, cause: str) -> None:
    engines.load()
    engines.wait_for(ModelLoaded)
    engines.run(1, f'{{"do":"{what}"}}')
    died = engines.wait_for(EngineDied)
    assert isinstance(died, EngineDied)
    assert died.cause == cause
    engines.load(slot=2)
    engines.wait_for(ModelLoaded, 2)
    engines.run(2, '{"x":1}', slot=2)
    engines.wait_for(BatchCompleted)


def test_kill_9_is_told(engines: Engines) -> None:
    engines.load()
    engines.wait_for(ModelLoaded)
    os.kill(engines.links.pids()[KEY], signal.SIGKILL)
    died = engines.wait_for(EngineDied)
    assert isinstance(died, EngineDied)
    assert died.cause.startswith("SIGKILL")


def test_an_exception_is_an_answer(engines: Engines) -> None:
    engines.load()
    engines.wait_for(ModelLoaded)
    engines.run(1, '{"do":"raise"}')
    failed = engines.wait_for(BatchFailed)
    assert isinstance(failed, BatchFailed)
    assert (failed.code, failed.message) == ("engine_error", "RuntimeError: asked to raise")
    engines.run(2, '{"x":1}')
    engines.wait_for(BatchCompleted)


def test_answers_that_cannot_be_sent_are_the_backends_fault(engines: Engines) -> None:
    engines.load()
    engines.wait_for(ModelLoaded)
    engines.run(1, '{"do":"nonsense"}')
    failed = engines.wait_for(BatchFailed)
    assert isinstance(failed, BatchFailed)
    assert failed.code == "engine_error"


def test_a_hanging_engine_can_be_stopped_and_says_nothing_more(engines: Engines) -> None:
    engines.load()
    engines.wait_for(ModelLoaded)
    engines.run(1, '{"do":"hang"}')
    pid = engines.links.pids()[KEY]
    engines.links.stop(KEY)
    wait_until(lambda: engines.links.poll(5) or not psutil.pid_exists(pid), "the process to end")
    assert not any(isinstance(event, EngineDied) for event in engines.said)


@pytest.mark.parametrize(("load", "code"), [("refuse", "digest_mismatch"), ("raise", "load_failed")])
def test_failed_loads(engines: Engines, load: str, code: str) -> None:
    engines.load(config={"load": load})
    failed = engines.wait_for(LoadFailed)
    assert isinstance(failed, LoadFailed)
    assert failed.code == code


def test_a_warm_up_that_fails_fails_the_load(engines: Engines) -> None:
    engines.load(pre_warmup=('{"do":"refuse"}',))
    failed = engines.wait_for(LoadFailed)
    assert isinstance(failed, LoadFailed)
    assert failed.code == "warmup_failed"


def test_a_load_does_not_stop_other_models(engines: Engines, tmp_path: Path) -> None:
    engines.load()
    engines.wait_for(ModelLoaded)
    gate = tmp_path / "gate"
    engines.load(slot=2, config={"load": "await", "file": str(gate)})
    for number in range(20):
        engines.run(number, '{"x":1}')
    engines.wait_for(BatchCompleted, 20)
    assert sum(isinstance(event, ModelLoaded) for event in engines.said) == 1
    gate.touch()
    engines.wait_for(ModelLoaded, 2)


def test_a_model_unloaded_while_it_loads_is_never_reported(engines: Engines) -> None:
    engines.load(slot=1, config={"load": "slow"})
    engines.links.unload(KEY, 1)
    engines.load(slot=2)
    loaded = engines.wait_for(ModelLoaded)
    assert isinstance(loaded, ModelLoaded)
    assert loaded.slot == 2


def test_a_busy_engine_never_blocks_the_host(engines: Engines, tmp_path: Path) -> None:
    engines.load()
    engines.wait_for(ModelLoaded)
    gate = tmp_path / "gate"
    engines.run(1, json.dumps({"do": "await", "file": str(gate)}))
    big = '{"x":"' + "y" * 200_000 + '"}'
    for number in range(2, 12):
        engines.run(number, *([big] * 10))  # 20 MB, far more than a socket buffers
    assert not any(isinstance(event, BatchCompleted) for event in engines.links.poll(0))
    gate.touch()
    done = engines.wait_for(BatchCompleted, 11)
    assert isinstance(done, BatchCompleted)
    assert len(done.outputs) == 10
    assert done.outputs[0].outputs == big.encode()


def test_an_unknown_backend_ends_the_process_with_words(engines: Engines) -> None:
    engines.links.load(EngineKey("cpu:0", "nope"), 1, trouble())
    died = engines.wait_for(EngineDied)
    assert isinstance(died, EngineDied)
    assert died.cause == "exit 2"


def test_an_engine_dies_with_its_host() -> None:
    host = textwrap.dedent("""
        import sys, os
        from gpu_worker.edge.engine_link import EngineLinks
        from gpu_worker.engine_port import EngineKey, ModelLoaded
        from tests.unit.worker.rig import launch_of
        key = EngineKey("cpu:0", "trouble")
        links = EngineLinks(1)
        links.load(key, 1, launch_of("m", backend="trouble"))
        while not any(isinstance(event, ModelLoaded) for event in links.poll(100)):
            pass
        print(links.pids()[key], flush=True)
        sys.stdin.read()
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(ROOT)])}
    process = subprocess.Popen(
        [sys.executable, "-c", host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT
    )
    with process:
        assert process.stdout is not None
        engine = int(process.stdout.readline())
        assert psutil.pid_exists(engine)
        process.kill()
        process.wait()
        wait_until(lambda: not psutil.pid_exists(engine), "the engine to end with its host")
