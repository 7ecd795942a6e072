"""The tree: everything is on it exactly once, sums are sums, and it can be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sie_stream.cli.topology import as_json, bar, render
from sie_stream.topology.gpu_query import GIB, MIB
from sie_stream.topology.text import size_text
from sie_stream.topology.tree import Resident, Server, TreeNode, topology_tree
from tests.examples import examples
from tests.unit.topology.machines import MACHINES, topology


def below(nodes: Sequence[TreeNode]) -> Iterator[TreeNode]:
    for node in nodes:
        yield node
        yield from below(node.children)


def named(nodes: Sequence[TreeNode], name: str) -> TreeNode:
    return next(node for node in below(nodes) if node.name == name)


def printed(nodes: Sequence[TreeNode]) -> list[str]:
    console = Console(width=160, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render(nodes))
    return [line.rstrip() for line in capture.get().splitlines()]


def device_names(machine: str) -> list[str]:
    server = topology(machine)
    names = [gpu.device for gpu in server.gpus] + [cpu.device for cpu in server.cpus]
    return names + [instance.device for gpu in server.gpus for instance in gpu.mig]


@st.composite
def occupied(draw: st.DrawFn) -> Server:
    machine = draw(st.sampled_from(MACHINES))
    devices = [*device_names(machine), "cuda:99"]
    residents = tuple(
        Resident(draw(st.sampled_from(devices)), f"m{number}", "1", "ready", draw(st.integers(0, 80 * GIB)))
        for number in range(draw(st.integers(0, 8)))
    )
    return Server("s", topology(machine), residents)


@examples(40)
@given(occupied())
def test_every_device_and_resident_is_there_once_and_sums_are_sums(server: Server) -> None:
    (root,) = topology_tree([server])
    nodes = list(below([root]))
    assert sorted(n.name for n in nodes if n.kind == "resident") == sorted(f"{r.model}@1" for r in server.residents)
    devices = [n.name for n in nodes if n.kind == "device"]
    assert len(devices) == len(set(devices))
    assert {gpu.device for gpu in server.topology.gpus} <= set(devices)
    assert root.used_bytes == sum(r.memory_bytes for r in server.residents)
    for node in nodes:
        if node.kind in ("server", "numa", "island"):
            assert node.memory_bytes == sum(child.memory_bytes for child in node.children)
        if node.children:
            assert node.used_bytes == sum(child.used_bytes for child in node.children)


def test_levels_of_a_dgx() -> None:
    residents = (
        Resident("cuda:0", "llama", "1", "ready", 30 * GIB),
        Resident("cuda:0", "small", "2", "loading", 5 * GIB),
        Resident("cuda:1", "llama", "1", "ready", 30 * GIB),
    )
    roots = topology_tree([Server("dgx", topology("dgx-a100"), residents, workers=("w0",))])
    assert [(n.kind, n.detail) for n in roots] == [("server", "workers w0")]
    node = named(roots, "socket 0, NUMA 3")
    assert node.detail == "NICs mlx5_0, mlx5_1, mlx5_8"
    island = node.children[0]
    assert (island.kind, island.name, island.detail) == ("island", "island 0 (NV12, 8 GPUs)", "2 here")
    assert (island.used_bytes, island.memory_bytes, island.percent) == (65 * GIB, 80 * GIB, 81)
    assert [child.name for child in named(roots, "cuda:0").children] == ["llama@1", "small@2"], "largest first"


def test_mig_instances_hold_the_models() -> None:
    roots = topology_tree([Server("m", topology("a100-mig"), (Resident("mig:0:1", "bge", "1", "ready", GIB),))])
    gpu = named(roots, "cuda:0")
    assert [child.name for child in gpu.children] == ["mig:0:0", "mig:0:1", "mig:0:2", "mig:0:3"]
    assert gpu.memory_bytes == sum(child.memory_bytes for child in gpu.children)
    assert named(roots, "mig:0:1").used_bytes == GIB


def test_declared_sizes_win_and_unreported_devices_are_shown() -> None:
    server = Server(
        "c",
        topology("cpu-two-numa"),
        (Resident("cuda:7", "lost", "1", "ready", GIB),),
        declared=(("cpu:0", 4 * GIB), ("cpu:9", 2 * GIB)),
    )
    roots = topology_tree([server])
    assert named(roots, "cpu:0").memory_bytes == 4 * GIB
    unknown = named(roots, "NUMA not known")
    assert [(n.name, n.memory_bytes, n.used_bytes) for n in unknown.children] == [
        ("cpu:9", 2 * GIB, 0),
        ("cuda:7", 0, GIB),
    ]
    assert roots[0].children[-1] is unknown, "last"


def test_servers_are_in_order_of_name() -> None:
    empty = [Server(name, topology("cpu-two-numa")) for name in ("b", "a")]
    assert [root.name for root in topology_tree(empty)] == ["a", "b"]


def test_it_is_drawn_as_a_tree() -> None:
    residents = (
        Resident("cuda:2", "reranker[x]", "1", "ready", 40 * GIB),
        Resident("cpu:0", "churn", "3", "ready", 512 * MIB),
    )
    lines = printed(topology_tree([Server("pcie", topology("a100-pcie-4"), residents)]))
    assert lines[0].startswith("pcie")
    assert lines[1].startswith("├── socket 0, NUMA 0  NICs mlx5_0")
    assert lines[2].startswith("│   ├── island 0 (NV12, 2 GPUs)  2 here")
    device = next(line for line in lines if "cuda:2" in line)
    assert "NVIDIA A100 80GB PCIe" in device
    assert "█████░░░░░  50 % 40.0 GiB of 80.0 GiB" in device
    assert any(line.endswith("reranker[x]@1  ready  40.0 GiB") for line in lines), "brackets are no markup"
    assert any(line.endswith("churn@3  ready  512 MiB") for line in lines)


def test_json_has_the_same_tree() -> None:
    roots = topology_tree([Server("h", topology("hgx-h100"), (Resident("cuda:5", "m", "1", "ready", GIB),))])

    def flat(items: Sequence[dict[str, object]]) -> list[tuple[object, object, object]]:
        found: list[tuple[object, object, object]] = []
        for item in items:
            found.append((item["name"], item["used_bytes"], item["percent"]))
            found += flat(item["children"])  # pyright: ignore[reportArgumentType]
        return found

    assert flat(as_json(roots)) == [(n.name, n.used_bytes, n.percent) for n in below(roots)]


@pytest.mark.parametrize(
    ("percent", "cells", "style"),
    [(0, 0, "green"), (1, 1, "green"), (85, 9, "yellow"), (100, 10, "yellow"), (130, 10, "red")],
)
def test_bars(percent: int, cells: int, style: str) -> None:
    text = bar(percent)
    assert text.count("█") == cells
    assert text.count("░") == 10 - cells
    assert text.startswith(f"[{style}]")


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 MiB"), (MIB - 1, "0 MiB"), (512 * MIB, "512 MiB"), (GIB, "1.0 GiB"), (GIB * 395 // 10, "39.5 GiB")],
)
def test_sizes_in_words(size: int, words: str) -> None:
    assert size_text(size) == words
