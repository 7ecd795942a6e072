"""Weights that leave the device and come back to other pages: the same module answers with the same bits."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel

from gpu_worker.backends.decoder.model import DecoderModel
from gpu_worker.backends.slots.address_space import AddressRange, bytes_at, copy
from gpu_worker.backends.slots.arena import Arena
from gpu_worker.backends.slots.slot import ModelSlot, SlotError
from gpu_worker.backends.slots.tensor_weights import tensor_weights
from gpu_worker.backends.slots.weights import Movable
from gpu_worker.backends.torch_backend import TorchBackend
from gpu_worker.edge.device_arena import DeviceArena
from gpu_worker.memory.pages import pages_of
from tests.decoders.families import FAMILIES, ask, load, save
from tests.libraries.backends.launching import FixedClock, launch, row

MODELS = Path(__file__).resolve().parents[2] / ".models"
PAGES = 64
NARROW = [("dense", "bfloat16"), ("int8", "float32"), ("int4", "float32")]
PROMPTS = [[5, 9, 11], [7], [3, 3, 8, 1, 30, 41, 12], [60, 4]]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = DeviceArena(PAGES * 64 * 1024, tmp_path)
    yield Arena(made.file, made.page_bytes, tmp_path)
    made.close()


def answers(model: DecoderModel) -> list[Any]:
    model.reset()  # nothing is taken from the prefix cache: all is computed with the weights that are there now
    items = [ask(str(number), ids, max_tokens=6) for number, ids in enumerate(PROMPTS)]
    return [(one.token_ids, one.outputs, one.error_code) for one in model.run(items)]


def page_table(size: int, arena: Arena, shift: int) -> list[int]:
    """Scattered over the arena, another one for every shift."""
    return [(7 * page + 5 * shift) % PAGES for page in range(pages_of(size, arena.page_bytes))]


@pytest.mark.parametrize(
    ("family", "precision", "dtype"),
    [
        *((family, "dense", "float32") for family in sorted(FAMILIES)),
        *((family, precision, dtype) for family in ("llama", "qwen2", "gemma2") for precision, dtype in NARROW),
    ],
)
def test_every_family_and_precision_answers_alike_after_every_switch(
    family: str, precision: str, dtype: str, arena: Arena, tmp_path: Path
) -> None:
    model = load(save(tmp_path / "m", family), precision=precision, dtype=dtype, kv_mb=1)
    expected = answers(model)
    assert [code for _, _, code in expected] == [None] * len(PROMPTS)
    slot = ModelSlot(model.weights(), arena)
    assert slot.size >= model.memory_bytes
    for shift, tier in enumerate(["host", "host", "disk", "host", "disk"]):
        slot.move_image("disk" if tier == "disk" else "host")
        table = page_table(slot.size, arena, shift)
        assert slot.activate(table) == tier
        assert slot.activate(table) == "resident"
        assert answers(model) == expected
        slot.deactivate()
    slot.close()


@pytest.mark.parametrize(("config", "network"), [(BertConfig, BertModel), (DistilBertConfig, DistilBertModel)])
def test_encoders_too(config: Any, network: Any, arena: Arena, tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "n_layers": 2, "n_heads": 4}
    shape = {"hidden_size": 32, "dim": 32, "intermediate_size": 64, "hidden_dim": 64, "vocab_size": 64}
    network(config(**sizes, **shape)).save_pretrained(tmp_path / "m")
    model = TorchBackend(FixedClock()).load(launch(tmp_path / "m", "torch", {"kind": "embedding"}))
    assert isinstance(model, Movable)
    items = [row(str(number), {}, token_ids=ids) for number, ids in enumerate(PROMPTS)]
    expected = model.run(items)
    slot = ModelSlot(model.weights(), arena)
    for shift in range(3):
        slot.activate(page_table(slot.size, arena, shift))
        assert model.run(items) == expected
        slot.deactivate()


def test_two_models_in_turn_on_the_same_pages(arena: Arena, tmp_path: Path) -> None:
    models = [load(save(tmp_path / family, family), kv_mb=1) for family in ("llama", "qwen3")]
    expected = [answers(model) for model in models]
    assert expected[0] != expected[1]
    slots = [ModelSlot(model.weights(), arena) for model in models]
    for turn in range(6):
        slot, model = slots[turn % 2], models[turn % 2]
        slot.activate(page_table(slot.size, arena, 0))
        assert answers(model) == expected[turn % 2]
        slot.deactivate()


def test_other_pages_for_an_active_model_are_refused_and_it_goes_on(arena: Arena, tmp_path: Path) -> None:
    model = load(save(tmp_path / "m"), kv_mb=1)
    expected = answers(model)
    slot = ModelSlot(model.weights(), arena)
    slot.activate(page_table(slot.size, arena, 0))
    with pytest.raises(SlotError, match="active already"):
        slot.activate(page_table(slot.size, arena, 1))
    assert answers(model) == expected
    slot.deactivate()
    with pytest.raises(SlotError, match="pages of 65536 bytes do not hold"):
        slot.activate([0])
    with pytest.raises(SlotError, match="the arena has pages 0 to 63"):
        slot.activate(range(PAGES - 1, PAGES - 1 + pages_of(slot.size, arena.page_bytes)))
    assert not slot.active


def test_an_image_that_cannot_be_read_leaves_the_model_inactive(arena: Arena, tmp_path: Path) -> None:
    model = load(save(tmp_path / "m"), kv_mb=1)
    slot = ModelSlot(model.weights(), arena)
    slot.move_image("disk")
    [file] = [link for link in Path("/proc/self/fd").iterdir() if _shows(link, tmp_path)]
    with open(file, "r+b") as stream:
        stream.truncate(100)
    with pytest.raises(OSError, match="the image file ends after 100 of"):
        slot.activate(page_table(slot.size, arena, 0))
    assert not slot.active
    with pytest.raises(OSError, match="ends after"):
        slot.move_image("host")
    assert slot.tier == "disk"


def _shows(link: Path, folder: Path) -> bool:
    try:
        target = os.readlink(link)
    except OSError:
        return False
    return target.startswith(str(folder)) and "deleted" in target


def test_images_on_the_disk_have_no_name(arena: Arena, tmp_path: Path) -> None:
    slot = ModelSlot(load(save(tmp_path / "m"), kv_mb=1).weights(), arena)
    slot.move_image("disk")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.fixture
def two_pages(arena: Arena) -> Iterator[tuple[Arena, AddressRange]]:
    reserved = AddressRange(2 * arena.page_bytes)
    yield arena, reserved
    reserved.release()


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_pages_keep_their_page_table_entries_from_model_to_model(two_pages: tuple[Arena, AddressRange]) -> None:
    """The kernel needs as long to make them as to copy what is in the pages."""
    arena, reserved = two_pages
    others = AddressRange(reserved.size)
    arena.lend([5, 9], reserved.address)
    bytes_at(reserved.address, reserved.size)[:] = b"a" * arena.page_bytes + b"b" * arena.page_bytes
    arena.take_back([5, 9], reserved.address)
    reserved.unmap()
    before = _faults()
    for target in (others, reserved):
        arena.lend([9, 5], target.address)
        ctypes.memset(target.address, ord("c"), 1)
        assert ctypes.string_at(target.address + arena.page_bytes, 1) == b"a"
        arena.take_back([9, 5], target.address)
        target.unmap()
    assert _faults() - before < 2 * reserved.size // mmap.PAGESIZE  # as many when each was made anew
    others.release()


def test_a_kernel_that_cannot_move_pages_maps_them(
    two_pages: tuple[Arena, AddressRange], monkeypatch: pytest.MonkeyPatch
) -> None:
    arena, reserved = two_pages
    monkeypatch.setattr("gpu_worker.backends.slots.arena.move", lambda source, target, size: False)
    for pages, expected in (([5, 9], b"\0\0"), ([9, 5], b"ba"), ([5, 9], b"ba")):
        arena.lend(pages, reserved.address)
        found = [bytes_at(reserved.address, reserved.size)[place * arena.page_bytes] for place in (0, 1)]
        assert bytes(found) == expected
        bytes_at(reserved.address, reserved.size)[0 :: arena.page_bytes] = b"ab"
        arena.take_back(pages, reserved.address)
        reserved.unmap()


def test_pages_that_come_back_without_being_read_are_at_home(arena: Arena, tmp_path: Path) -> None:
    """Of an image that could not be read: the next model is lent the same ones."""
    broken, sound = (load(save(tmp_path / family, family), kv_mb=1) for family in ("llama", "qwen3"))
    expected = answers(sound)
    slots = [ModelSlot(model.weights(), arena) for model in (broken, sound)]
    slots[0].move_image("disk")
    [file] = [link for link in Path("/proc/self/fd").iterdir() if _shows(link, tmp_path)]
    with open(file, "r+b") as stream:
        stream.truncate(100)
    for turn in range(3):
        with pytest.raises(OSError, match="ends after 100"):
            slots[0].activate(page_table(slots[0].size, arena, turn))
        slots[1].activate(page_table(slots[1].size, arena, turn))
        assert answers(sound) == expected
        slots[1].deactivate()


def test_weights_that_are_not_there_are_no_weights() -> None:
    """A model that runs although it is not active ends its process; it never answers with what others left there."""
    code = (
        "import torch\n"
        "from pathlib import Path\n"
        "from gpu_worker.backends.slots.arena import Arena\n"
        "from gpu_worker.backends.slots.slot import ModelSlot\n"
        "from gpu_worker.backends.slots.tensor_weights import tensor_weights\n"
        "weight = torch.ones(1000)\n"
        "slot = ModelSlot(tensor_weights([weight]), Arena(-1, 65536, Path('.')))\n"
        "print(float(weight.sum()))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout == ""
    assert ended.returncode == -signal.SIGSEGV


def test_tensors_of_one_storage_move_together() -> None:
    both = torch.arange(20, dtype=torch.float32)
    first, second = both[2:10], both[6:20:2]
    [weight] = tensor_weights([first, second, first])
    assert weight.size_bytes == 4 * 17
    target = bytearray(weight.size_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    copy(address, weight.address, weight.size_bytes)
    expected = first.tolist(), second.tolist()
    weight.move_to(address)
    both.zero_()
    assert (first.tolist(), second.tolist()) == expected
    assert weight.address == address


@pytest.mark.slow
@pytest.mark.parametrize(("name", "switches"), [("minilm-l6-v2", 100), ("smollm2-135m-instruct", 40)])
def test_switches_of_a_real_model_leave_nothing_behind(name: str, switches: int, tmp_path: Path) -> None:
    """Golden answers right after every tenth switch; memory as it was. 270 MB are copied in each of the large one's."""
    folder = MODELS / name
    if not (folder / "build.json").exists():
        pytest.skip("make models has not built it")
    config = {"kind": "embedding"} if "minilm" in name else {"kind": "text_generation", "max_tokens": 4, "kv_mb": 32}
    model = TorchBackend(FixedClock()).load(launch(folder, "torch", config))
    assert isinstance(model, Movable)
    items = [row(str(number), {}, token_ids=[100 + number, 200, 300]) for number in range(2)]
    expected = [(one.outputs, one.token_ids) for one in model.run(items)]
    made = DeviceArena(640 * 2**20, tmp_path)
    arena = Arena(made.file, made.page_bytes, tmp_path)
    slot = ModelSlot(model.weights(), arena)
    total = made.size_bytes // made.page_bytes
    count = pages_of(slot.size, made.page_bytes)
    private: list[int] = []
    for turn in range(switches):
        assert slot.activate([(turn + page) % total for page in range(count)]) == "host"
        if turn % 10 == 0:
            assert [(one.outputs, one.token_ids) for one in model.run(items)] == expected
        slot.deactivate()
        private.append(psutil.Process().memory_info().rss - psutil.Process().memory_info().shared)
    assert private[-1] <= private[20] + 8 * 2**20
    slot.close()
    made.close()
