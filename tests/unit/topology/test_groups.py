"""Islands, distances and groups: examples of known machines, and slow twins on random ones."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sie_stream.topology.groups import best_groups, distance, islands
from sie_stream.topology.records import LINK_KINDS, LINK_RANK, Gpu, GpuTopology, Link, LinkKind
from tests.examples import examples
from tests.unit.topology.machines import topology


@st.composite
def servers(draw: st.DrawFn) -> GpuTopology:
    count = draw(st.integers(1, 7))
    gpus = tuple(
        Gpu(
            index,
            f"GPU-{index}",
            "A100",
            1,
            f"0000:{index:02x}:00.0",
            draw(st.integers(0, 2)),
            draw(st.integers(0, 1)),
            mig_enabled=draw(st.integers(0, 9)) == 0,
        )
        for index in range(count)
    )
    kinds: list[LinkKind] = [draw(st.sampled_from(LINK_KINDS)) for _ in range(count * (count - 1) // 2)]
    pairs = itertools.combinations(gpus, 2)
    links = tuple(
        Link(a.name, b.name, kind, draw(st.integers(1, 4)) if kind == "NV" else 0)
        for (a, b), kind in zip(pairs, kinds, strict=True)
    )
    return GpuTopology(gpus, (), links)


def connected(server: GpuTopology, a: int, b: int) -> bool:
    """Slow twin of `islands`: is there any path of NVLinks?"""
    usable = {gpu.name for gpu in server.gpus if not gpu.mig_enabled}
    reached = {f"GPU{a}"}
    for _ in server.gpus:
        for link in server.links:
            ends = {link.a, link.b}
            if link.kind == "NV" and ends <= usable and ends & reached:
                reached |= ends
    return f"GPU{b}" in reached


@examples(60)
@given(servers())
def test_islands_are_what_nvlink_reaches(server: GpuTopology) -> None:
    found = islands(server)
    assert sorted(index for island in found for index in island) == [gpu.index for gpu in server.gpus]
    together = {frozenset(pair) for island in found for pair in itertools.combinations(island, 2)}
    for a, b in itertools.combinations(range(len(server.gpus)), 2):
        assert (frozenset((a, b)) in together) == connected(server, a, b)


def pair_ranks(server: GpuTopology, group: tuple[int, ...]) -> tuple[int, int]:
    ranks = [
        LINK_RANK[link.kind]
        for a, b in itertools.combinations(group, 2)
        if (link := distance(server, f"GPU{a}", f"GPU{b}")) is not None
    ]
    return max(ranks, default=0), sum(ranks)


@examples(60)
@given(servers(), st.integers(1, 5))
def test_groups_are_disjoint_complete_and_the_first_is_the_nearest(server: GpuTopology, size: int) -> None:
    usable = [gpu.index for gpu in server.gpus if not gpu.mig_enabled]
    groups = best_groups(server, size)
    chosen = [index for group in groups for index in group.gpus]
    assert len(chosen) == len(set(chosen))
    assert set(chosen) <= set(usable)
    assert [len(group.gpus) for group in groups] == [size] * (len(usable) // size)
    if groups:
        nearest = min(pair_ranks(server, subset) for subset in itertools.combinations(usable, size))
        assert pair_ranks(server, groups[0].gpus) == nearest
    for group in groups:
        worst, _ = pair_ranks(server, group.gpus)
        assert group.worst == (LINK_KINDS[worst] if size > 1 else None)


@examples(25)
@given(servers(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_order_in_which_things_are_told_does_not_matter(server: GpuTopology, size: int, chance: Random) -> None:
    shuffled = list(server.links)
    chance.shuffle(shuffled)
    turned = tuple(structs.replace(link, a=link.b, b=link.a) for link in shuffled)
    again = structs.replace(server, links=turned)
    free = [gpu.index for gpu in server.gpus]
    assert best_groups(again, size, free[::-1]) == best_groups(server, size)
    assert islands(again) == islands(server)


def gpus_of(machine: str, size: int) -> list[tuple[int, ...]]:
    return [group.gpus for group in best_groups(topology(machine), size)]


def test_on_an_nvswitch_groups_keep_to_nodes_and_sockets() -> None:
    assert gpus_of("dgx-a100", 2) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert gpus_of("dgx-a100", 4) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert gpus_of("hgx-h100", 8) == [(0, 1, 2, 3, 4, 5, 6, 7)]
    assert best_groups(topology("dgx-a100"), 4)[1].numa_nodes == (5, 7)


def test_bridged_pairs_are_islands() -> None:
    assert islands(topology("a100-pcie-4")) == ((0, 1), (2, 3))
    assert gpus_of("a100-pcie-4", 2) == [(0, 1), (2, 3)]
    whole = best_groups(topology("a100-pcie-4"), 4)[0]
    assert (whole.worst, whole.islands) == ("SYS", (0, 1))


def test_without_nvlink_the_pcie_tree_decides() -> None:
    groups = best_groups(topology("l40s-4"), 2)
    assert [(group.gpus, group.worst) for group in groups] == [((2, 3), "PHB"), ((0, 1), "NODE")]


def test_a_broken_island_is_used_up_first() -> None:
    a100 = topology("a100-pcie-4")
    assert [group.gpus for group in best_groups(a100, 1, free=[0, 2, 3])] == [(0,), (2,), (3,)]
    assert best_groups(a100, 1, free=[1, 2, 3])[0].gpus == (1,), "not one of the whole pair 2, 3"


def test_free_devices_limit_the_choice() -> None:
    dgx = topology("dgx-a100")
    assert [group.gpus for group in best_groups(dgx, 2, free=[1, 2, 3, 6])] == [(2, 3), (1, 6)]
    assert best_groups(dgx, 4, free=[0, 1, 2]) == ()


def test_mig_is_alone_and_in_no_group() -> None:
    server = topology("a100-mig")
    assert islands(server) == ((0,), (1,)), "there is an NVLink, but instances cannot use it"
    assert [group.gpus for group in best_groups(server, 1)] == [(1,)]


def test_many_gpus_are_grouped_without_comparing_every_subset() -> None:
    gpus = tuple(Gpu(n, f"GPU-{n}", "V100", 1, f"0000:{n:02x}:00.0", n // 8, n // 8) for n in range(16))
    links = tuple(Link(a.name, b.name, "NV", 6) for a, b in itertools.combinations(gpus, 2))
    groups = best_groups(GpuTopology(gpus, (), links), 8)
    assert [group.gpus for group in groups] == [tuple(range(8)), tuple(range(8, 16))]


def test_more_nvlinks_are_nearer() -> None:
    """A quarter of a DGX-1: 0-1 has one link, 0-2 two."""
    gpus = tuple(Gpu(n, f"GPU-{n}", "V100", 1, f"0000:{n:02x}:00.0") for n in range(3))
    links = (Link("GPU0", "GPU1", "NV", 1), Link("GPU0", "GPU2", "NV", 2), Link("GPU1", "GPU2", "NV", 1))
    assert best_groups(GpuTopology(gpus, (), links), 2)[0].gpus == (0, 2)


def test_distances_go_both_ways() -> None:
    server = topology("a100-pcie-4")
    assert distance(server, "GPU1", "GPU0") == distance(server, "GPU0", "GPU1") == Link("GPU0", "GPU1", "NV", 12)
    assert distance(server, "NIC0", "NIC0") is None
    with pytest.raises(KeyError, match="GPU9"):
        distance(server, "GPU0", "GPU9")


def test_impossible_wishes_are_named() -> None:
    with pytest.raises(ValueError, match="size 0"):
        best_groups(topology("l40s-4"), 0)
    with pytest.raises(ValueError, match="free 4: allowed 0, 1, 2, 3"):
        best_groups(topology("l40s-4"), 1, free=[4])
