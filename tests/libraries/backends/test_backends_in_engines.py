"""Backends through real engine processes: the example of a third party, and a server that dies."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_worker.backends.base import ENTRY_POINT_GROUP, EngineInput
from gpu_worker.edge.engine_link import EngineLinks
from gpu_worker.engine_port import (
    BatchCompleted,
    EngineDied,
    EngineEvent,
    EngineKey,
    EngineStarted,
    LoadFailed,
    ModelLoaded,
)
from tests.libraries.backends.fake_language_server import vllm_routes
from tests.libraries.backends.launching import launch
from tests.libraries.backends.wrong_servers import serving
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "backend_example"
RULES = EngineKey("cpu:0", "rules")
VLLM = EngineKey("cpu:0", "vllm")


class Engines:
    def __init__(self, path: Path) -> None:
        self.links = EngineLinks(1, environment={"PYTHONPATH": os.pathsep.join(map(str, (path, EXAMPLE, ROOT)))})
        self._said: list[EngineEvent] = []

    def wait_for(self, kind: type[EngineEvent]) -> EngineEvent:
        def found() -> list[EngineEvent]:
            self._said.extend(self.links.poll(20))
            return [event for event in self._said if isinstance(event, kind)]

        event = wait_until(found, kind.__name__)[0]
        self._said.remove(event)
        return event


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Engines that find the entry points of this tree and of the example, as if both had just been installed."""
    for project in (ROOT, EXAMPLE):
        described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        info = tmp_path / f"{described['name'].replace('-', '_')}_here-{described['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {described['name']}-here\nVersion: {described['version']}\n")
        points = described["entry-points"][ENTRY_POINT_GROUP]
        lines = [f"[{ENTRY_POINT_GROUP}]", *(f"{name} = {target}" for name, target in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
    made = Engines(tmp_path)
    yield made
    made.links.close()


def test_the_example_is_short() -> None:
    assert len((EXAMPLE / "sie_rules.py").read_text().splitlines()) <= 60


def test_the_example_loads_and_answers(engines: Engines, tmp_path: Path) -> None:
    source = tmp_path / "topics"
    source.mkdir()
    (source / "config.json").write_text('{"sports": ["goal", "match"], "money": ["bank"]}')
    engines.links.load(RULES, 1, launch(source, "rules", {"default_label": "none"}))
    loaded = engines.wait_for(ModelLoaded)
    started = engines.wait_for(EngineStarted)
    assert isinstance(loaded, ModelLoaded)
    assert isinstance(started, EngineStarted)
    assert (loaded.memory_bytes, started.versions) == (len((source / "config.json").read_text()), {"sie-rules": "1.0"})
    texts = (b'{"text": "What a GOAL"}', b'{"text": "?"}', b'{"txt": 1}')
    engines.links.submit(RULES, 1, 1, [EngineInput(str(number), text) for number, text in enumerate(texts)])
    done = engines.wait_for(BatchCompleted)
    assert isinstance(done, BatchCompleted)
    assert [json.loads(one.outputs)["label"] if one.outputs else one.error_code for one in done.outputs] == [
        "sports",
        "none",
        "invalid_input",
    ]
    engines.links.load(RULES, 2, launch(source, "rules", {}, digest=f"sha256:{'0' * 64}"))
    refused = engines.wait_for(LoadFailed)
    assert isinstance(refused, LoadFailed)
    assert refused.code == "weights_digest_mismatch"


def test_an_engine_ends_with_its_server_and_a_new_one_serves_again(engines: Engines) -> None:
    with serving(vllm_routes()) as server:
        engines.links.load(VLLM, 1, launch(Path("m"), "vllm", {"url": server.url}))
        engines.wait_for(ModelLoaded)
        server.end()
        engines.links.submit(VLLM, 1, 1, [EngineInput("r", b"{}", token_ids=[1])])
        died = engines.wait_for(EngineDied)
        assert isinstance(died, EngineDied)
        assert died.cause == "exit 69"
    engines.links.load(VLLM, 2, launch(Path("m"), "vllm", {"url": server.url}))
    failed = engines.wait_for(LoadFailed)
    assert isinstance(failed, LoadFailed)
    assert failed.code == "server_unreachable"
    with serving(vllm_routes()) as server:
        engines.links.load(VLLM, 3, launch(Path("m"), "vllm", {"url": server.url}))
        engines.wait_for(ModelLoaded)
        engines.links.submit(VLLM, 2, 3, [EngineInput("r", b"{}", token_ids=[1])])
        done = engines.wait_for(BatchCompleted)
    assert isinstance(done, BatchCompleted)
    assert done.outputs[0].token_ids == [2]
