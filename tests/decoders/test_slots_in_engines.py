"""Real engine processes that share the arena of one device: switches, deaths in the middle of one, and neighbours."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpu_worker.backends.base import EngineInput
from gpu_worker.edge.device_arena import DeviceArena
from gpu_worker.edge.engine_link import EngineLinks
from gpu_worker.engine_port import (
    BatchCompleted,
    BatchFailed,
    EngineDied,
    EngineEvent,
    EngineKey,
    ImageMoved,
    ModelLoaded,
    ModelSwitched,
    SwitchFailed,
)
from gpu_worker.memory.pages import pages_of
from tests.decoders.families import save
from tests.libraries.backends.launching import launch
from tests.waiting import wait_until

DEVICE = "cpu:0"
TORCH = EngineKey(DEVICE, "torch")
MIB = 1024 * 1024
ROUNDS = 4
PROMPT = [5, 9, 11]
DECODER = {"kind": "text_generation", "max_tokens": 6, "kv_mb": 1}


class Engines:
    """Two processes of one backend on one device, as two workers' links would have them, and one arena."""

    def __init__(self, arena: DeviceArena) -> None:
        self.arena = arena
        self.links = [EngineLinks(1, arenas={DEVICE: arena}) for _ in range(2)]
        self._said: list[list[EngineEvent]] = [[], []]
        self._batch = 0

    def wait_for(self, kind: type[EngineEvent], at: int = 0) -> EngineEvent:
        def found() -> list[EngineEvent]:
            self._said[at].extend(self.links[at].poll(20))
            return [event for event in self._said[at] if isinstance(event, kind)]

        event = wait_until(found, kind.__name__)[0]
        self._said[at].remove(event)
        return event

    def load(self, slot: int, folder: Path, at: int = 0) -> int:
        """Pages that its image takes."""
        self.links[at].load(TORCH, slot, launch(folder, "torch", {**DECODER}))
        loaded = self.wait_for(ModelLoaded, at)
        assert isinstance(loaded, ModelLoaded)
        assert loaded.pools == {"arena 0": pytest.approx(MIB, rel=0.1)}
        return pages_of(loaded.image_bytes, self.arena.page_bytes)

    def switch(self, slot: int, pages: range, at: int = 0) -> ModelSwitched:
        self.links[at].activate(TORCH, slot, list(pages))
        event = self.wait_for(ModelSwitched, at)
        assert isinstance(event, ModelSwitched)
        return event

    def answer(self, slot: int, at: int = 0) -> list[int] | None:
        self._batch += 1
        self.links[at].submit(TORCH, self._batch, slot, [EngineInput("r", b"{}", list(PROMPT))])
        done = self.wait_for(BatchCompleted, at)
        assert isinstance(done, BatchCompleted)
        return done.outputs[0].token_ids


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    arena = DeviceArena(128 * MIB, tmp_path / "images")
    made = Engines(arena)
    yield made
    pids = [pid for links in made.links for pid in links.pids().values()]
    for links in made.links:
        links.close()
    arena.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    large = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    return {
        "llama": save(root / "llama", "llama"),
        "qwen3": save(root / "qwen3", "qwen3"),
        "large": save(root / "large", "llama", **large),
    }


def test_models_change_places_and_answer_as_before(engines: Engines, folders: dict[str, Path]) -> None:
    """Also after their images were on the disk."""
    counts = {1: engines.load(1, folders["llama"]), 2: engines.load(2, folders["qwen3"])}
    answers: dict[int, list[int] | None] = {}
    for turn in range(6):
        slot = 1 + turn % 2
        switched = engines.switch(slot, range(turn, turn + counts[slot]))
        assert switched.switch_class == ("disk" if turn in (4, 5) else "host")
        assert switched.size > 0
        assert answers.setdefault(slot, engines.answer(slot)) == engines.answer(slot)
        assert engines.switch(slot, range(turn, turn + counts[slot])).switch_class == "resident"
        engines.links[0].deactivate(TORCH, slot)
        if turn in (2, 3):
            engines.links[0].move_image(TORCH, slot, "disk")
            moved = engines.wait_for(ImageMoved)
            assert isinstance(moved, ImageMoved)
            assert (moved.slot, moved.tier, moved.message) == (slot, "disk", "")
    assert answers[1] != answers[2]


def test_what_is_not_on_the_device_is_not_run(engines: Engines, folders: dict[str, Path]) -> None:
    count = engines.load(1, folders["llama"])
    engines.links[0].submit(TORCH, 77, 1, [EngineInput("r", b"{}", list(PROMPT))])
    failed = engines.wait_for(BatchFailed)
    assert isinstance(failed, BatchFailed)
    assert "slot 1 is not on the device" in failed.message
    engines.switch(1, range(count))
    assert engines.answer(1)


def test_double_activation_with_other_pages_is_refused_and_the_model_serves_on(
    engines: Engines, folders: dict[str, Path]
) -> None:
    count = engines.load(1, folders["llama"])
    engines.switch(1, range(count))
    expected = engines.answer(1)
    engines.links[0].activate(TORCH, 1, list(range(count, 2 * count)))
    refused = engines.wait_for(SwitchFailed)
    assert isinstance(refused, SwitchFailed)
    assert "active already" in refused.message
    assert engines.answer(1) == expected
    engines.links[0].activate(TORCH, 9, [0])
    unknown = engines.wait_for(SwitchFailed)
    assert isinstance(unknown, SwitchFailed)
    assert "unloaded" in unknown.message


def test_kill_9_during_a_switch_leaves_the_neighbour_as_it_was(engines: Engines, folders: dict[str, Path]) -> None:
    """Both map the same arena. The one that dies was writing to its own pages; then others get these."""
    neighbour = engines.load(1, folders["llama"], at=1)
    engines.switch(1, range(neighbour), at=1)
    expected = engines.answer(1, at=1)
    dying = engines.load(5, folders["large"])
    pages = range(neighbour, neighbour + dying)
    for _ in range(3):
        engines.links[0].activate(TORCH, 5, list(pages))
        os.kill(engines.links[0].pids()[TORCH], signal.SIGKILL)
        died = engines.wait_for(EngineDied)
        assert isinstance(died, EngineDied)
        assert died.cause.startswith("SIGKILL")
        assert engines.answer(1, at=1) == expected
        assert engines.load(5, folders["large"]) == dying
    other = engines.load(2, folders["qwen3"], at=1)
    engines.switch(2, range(neighbour, neighbour + other), at=1)
    assert engines.answer(2, at=1) != expected
    assert engines.answer(1, at=1) == expected
    engines.switch(5, range(neighbour + other, neighbour + other + dying))
    assert engines.answer(5)


def test_two_engines_that_switch_at_once_do_not_touch_each_others_pages(
    engines: Engines, folders: dict[str, Path]
) -> None:
    counts = [engines.load(1, folders["large"], at=at) for at in (0, 1)]
    engines.switch(1, range(counts[0]))
    expected = engines.answer(1)
    for turn in range(3):
        engines.links[0].deactivate(TORCH, 1)
        for at in (0, 1):
            first = (counts[0] + turn) * (at ^ turn % 2)
            engines.links[at].activate(TORCH, 1, list(range(first, first + counts[at])))
        for at in (0, 1):
            assert isinstance(engines.wait_for(ModelSwitched, at), ModelSwitched)
        assert [engines.answer(1, at) for at in (0, 1)] == [expected, expected]
        engines.links[1].deactivate(TORCH, 1)


def test_two_models_of_one_trunk_share_keys_and_values_and_no_weights(
    engines: Engines, folders: dict[str, Path]
) -> None:
    count = engines.load(1, folders["llama"])
    assert engines.load(2, folders["llama"]) == count
    engines.switch(1, range(count))
    expected = engines.answer(1)
    engines.switch(2, range(count, 2 * count))
    engines.links[0].deactivate(TORCH, 1)
    assert engines.answer(2) == expected


def test_a_model_that_is_unloaded_gives_its_memory_back(engines: Engines, folders: dict[str, Path]) -> None:
    count = engines.load(1, folders["large"])
    process = psutil.Process(engines.links[0].pids()[TORCH])

    def private() -> int:
        info = process.memory_info()
        return info.rss - info.shared

    def load_and_unload() -> None:
        engines.load(2, folders["large"])
        engines.switch(2, range(count))
        engines.links[0].unload(TORCH, 2)
        engines.switch(1, range(count))
        assert engines.answer(1)

    load_and_unload()  # what the allocator keeps of the first, the others use again
    before = private()
    for _ in range(ROUNDS):
        load_and_unload()
    # Some 60 MiB each.
    wait_until(lambda: private() < before + 60 * MIB, f"the memory of {ROUNDS} models to be free")
