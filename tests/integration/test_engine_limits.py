"""What real engine processes may take of the machine, and what happens when they want more."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from gpu_worker.backends.base import EngineInput
from gpu_worker.backends.served import guard
from gpu_worker.edge.engine_link import EngineLinks
from gpu_worker.engine_port import BatchCompleted, BatchFailed, EngineDied, EngineKey, LoadFailed, ModelLoaded
from gpu_worker.isolation import TRIAL_LOAD_NICE, EngineLimits
from sie_stream.control import TRIAL
from tests.integration.test_engine_process import PACKAGE, ROOT, Engines, trouble
from tests.waiting import PATIENCE_S

LIMIT_BYTES = 1 << 30


@pytest.fixture
def limited() -> Iterator[Callable[[EngineLimits], Engines]]:
    made: list[Engines] = []

    def make(limits: EngineLimits) -> Engines:
        engines = Engines()
        engines.links.close()
        path = os.pathsep.join([str(PACKAGE), str(ROOT)])
        engines.links = EngineLinks(1, {"cpu:0": limits}, {"PYTHONPATH": path})
        made.append(engines)
        return engines

    yield make
    for engines in made:
        engines.links.close()


def test_a_model_that_needs_more_than_the_limit_is_refused_and_its_neighbours_serve(
    limited: Callable[[EngineLimits], Engines],
) -> None:
    engines = limited(EngineLimits(memory_bytes=LIMIT_BYTES))
    engines.load(1)
    engines.wait_for(ModelLoaded)
    engines.load(2, config={"load": "large"})
    refused = engines.wait_for(LoadFailed)
    assert isinstance(refused, LoadFailed)
    assert (refused.slot, refused.code) == (2, "out_of_memory")
    assert "engine_memory_limit_mb" in refused.message
    engines.run(1, '{"x":1}')
    engines.wait_for(BatchCompleted)
    assert not [event for event in engines.said if isinstance(event, EngineDied)]


def test_a_batch_that_needs_more_than_the_limit_fails_and_the_next_is_answered(
    limited: Callable[[EngineLimits], Engines],
) -> None:
    engines = limited(EngineLimits(memory_bytes=LIMIT_BYTES))
    engines.load(1)
    engines.wait_for(ModelLoaded)
    engines.run(1, '{"do":"hold","mb":1500}')
    failed = engines.wait_for(BatchFailed)
    assert isinstance(failed, BatchFailed)
    assert "MemoryError" in failed.message
    engines.run(2, '{"do":"hold","mb":100}')
    engines.wait_for(BatchCompleted)


def test_without_a_limit_the_same_load_succeeds(limited: Callable[[EngineLimits], Engines]) -> None:
    engines = limited(EngineLimits())
    engines.load(1, config={"load": "large"})
    engines.wait_for(ModelLoaded)


def test_priority_and_processors_are_those_that_were_asked_for(limited: Callable[[EngineLimits], Engines]) -> None:
    cpu = max(os.sched_getaffinity(0))
    engines = limited(EngineLimits(nice=3, cpus=(cpu,)))
    engines.load(1)
    engines.wait_for(ModelLoaded)
    engines.run(1, '{"do":"standing"}')
    standing = outputs_of(engines)
    assert (standing["nice"], standing["cpus"], standing["policy"]) == (3 + os.nice(0), [cpu], os.SCHED_OTHER)
    # Between sessions only the niceness of a session counts, where the kernel has that at all.
    assert standing["autogroup"] in ("3", "none")


@pytest.mark.parametrize(
    ("domain", "threads", "more"), [("", 1, set()), (TRIAL, 1, {TRIAL_LOAD_NICE}), (TRIAL, 2, set())], ids=str
)
def test_only_versions_on_trial_load_at_a_lower_priority_and_their_batches_do_not(
    domain: str, threads: int, more: set[int]
) -> None:
    key = EngineKey("cpu:0", "trouble", domain)
    engines = Engines()
    engines.links.close()
    path = os.pathsep.join([str(PACKAGE), str(ROOT)])
    engines.links = EngineLinks(threads, environment={"PYTHONPATH": path})
    try:
        engines.links.load(key, 1, trouble())
        engines.wait_for(ModelLoaded)
        tasks = Path(f"/proc/{engines.links.pids()[key]}/task").iterdir()
        mine = os.nice(0)
        assert {niceness(task) for task in tasks} == {min(19, mine + one) for one in {0} | more}
        engines.links.submit(key, 1, 1, [EngineInput("1-0", b'{"do":"standing"}')])
        assert outputs_of(engines)["nice"] == mine
    finally:
        engines.links.close()


def niceness(task: Path) -> int:
    """Of a thread; field 19 of its stat, after a name that may contain anything."""
    return int((task / "stat").read_text().rpartition(")")[2].split()[16])


def test_real_time_is_taken_where_it_is_permitted_and_done_without_elsewhere(
    limited: Callable[[EngineLimits], Engines],
) -> None:
    engines = limited(EngineLimits(realtime_priority=2))
    engines.load(1)
    engines.wait_for(ModelLoaded)
    engines.run(1, '{"do":"standing"}')
    standing = outputs_of(engines)
    expected = (os.SCHED_RR, 2) if may_be_realtime() else (os.SCHED_OTHER, 0)
    assert (standing["policy"], standing["priority"]) == expected


def may_be_realtime() -> bool:
    """Asked in a process of its own, with the kernel's own answer."""
    code = "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def outputs_of(engines: Engines) -> dict[str, object]:
    completed = engines.wait_for(BatchCompleted)
    assert isinstance(completed, BatchCompleted)
    assert completed.outputs[0].outputs is not None
    return msgspec.json.decode(completed.outputs[0].outputs)


def test_a_server_that_an_engine_starts_has_no_limit_of_the_engine_s() -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA)[0])"

    def lowered() -> None:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, hard))

    command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, preexec_fn=lowered)
    assert int(said.stdout) == resource.getrlimit(resource.RLIMIT_DATA)[1]
