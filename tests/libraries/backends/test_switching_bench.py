"""The device of the benchmark's soak holds either of its two models and never both, however large they become."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.engine_port import EngineKey, ModelLoaded
from gpu_worker.memory.mapper import DeviceMemory
from gpu_worker.memory.pages import arena_of
from tests.bench.switching import either

MIB = 1 << 20
KEY = EngineKey("cpu:0", "torch")


def loaded(image_bytes: int, pools: dict[str, int]) -> ModelLoaded:
    return ModelLoaded(KEY, 1, image_bytes, "", 0, 0, image_bytes=image_bytes, pools=pools)


@given(larger=st.integers(512 * MIB, 4_000 * MIB), smaller=st.integers(40 * MIB, 4_000 * MIB), kv=st.integers(0, 512))
def test_one_fits_and_both_do_not(larger: int, smaller: int, kv: int) -> None:
    sizes = sorted((larger, smaller))
    both = [loaded(sizes[1], {"kv": kv * MIB} if kv else {}), loaded(sizes[0], {})]
    memory = DeviceMemory(*arena_of(either(*both)), 1 << 40)
    for slot, one in enumerate(both):
        memory.add(slot, "torch", one.image_bytes, 0, one.pools, 0.0)
    memory.activate(0)
    assert memory.lacking(1) > 0
    memory.evict(0)
    memory.activate(1)
    assert memory.lacking(0) > 0
