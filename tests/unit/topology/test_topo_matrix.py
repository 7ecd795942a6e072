"""`nvidia-smi topo -m`: what is printed is what is read, and garbage is named with its line."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_stream.topology.records import LINK_KINDS, NUMA_UNKNOWN, Link
from sie_stream.topology.text import TopologyError, cpu_list, cpu_ranges
from sie_stream.topology.topo_matrix import GpuAffinity, TopoMatrix, parse_topo_matrix
from tests.examples import examples
from tests.unit.topology.machines import rendered, text


@st.composite
def matrices(draw: st.DrawFn) -> TopoMatrix:
    gpus = draw(st.integers(1, 9))
    nics = draw(st.integers(0, 4))
    names = [f"GPU{number}" for number in range(gpus)] + [f"NIC{number}" for number in range(nics)]
    links: list[Link] = []
    for a, b in itertools.combinations(names, 2):
        kind = draw(st.sampled_from(LINK_KINDS if b.startswith("GPU") else LINK_KINDS[1:]))
        links.append(Link(a, b, kind, draw(st.integers(1, 18)) if kind == "NV" else 0))
    affinities = tuple(
        GpuAffinity(
            number,
            cpu_ranges(tuple(sorted(draw(st.sets(st.integers(0, 300), max_size=6))))),
            draw(st.integers(NUMA_UNKNOWN, 7)),
        )
        for number in range(gpus)
    )
    return TopoMatrix(affinities, tuple((f"NIC{number}", f"mlx5_{number}") for number in range(nics)), tuple(links))


@examples(50)
@given(matrices(), st.booleans(), st.booleans(), st.booleans())
def test_a_printed_matrix_is_read_back(matrix: TopoMatrix, spaces: bool, underlined: bool, extra: bool) -> None:
    assert parse_topo_matrix(rendered(matrix, spaces, underlined and not spaces, extra)) == matrix


def test_dgx_a100() -> None:
    matrix = parse_topo_matrix(text("dgx-a100", "topo-m.txt"))
    assert [gpu.numa_node for gpu in matrix.gpus] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert matrix.gpus[0].cpus == "48-63,176-191"
    assert len(matrix.links) == 18 * 17 // 2
    found = {(link.a, link.b): link.label for link in matrix.links}
    assert {found[f"GPU{a}", f"GPU{b}"] for a, b in itertools.combinations(range(8), 2)} == {"NV12"}
    assert (found["GPU0", "NIC0"], found["GPU0", "NIC8"], found["GPU0", "NIC9"]) == ("PXB", "NODE", "SYS")
    assert matrix.nics[9] == ("NIC9", "mlx5_9")


def test_underlined_header_and_a_gpu_numa_id_column() -> None:
    matrix = parse_topo_matrix(text("hgx-h100", "topo-m.txt"))
    assert {link.label for link in matrix.links if link.b.startswith("GPU")} == {"NV18"}
    assert [gpu.numa_node for gpu in matrix.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_matrix_pasted_with_spaces() -> None:
    matrix = parse_topo_matrix(text("l40s-4", "topo-m.txt"))
    assert [link.label for link in matrix.links] == ["NODE", "SYS", "SYS", "SYS", "SYS", "PHB"]
    assert matrix.gpus[2] == GpuAffinity(2, "96-191,288-383", 1)


def test_old_drivers_name_nics_in_the_header_and_the_sockets_soc() -> None:
    old = (
        "\tGPU0\tGPU1\tmlx4_0\tCPU Affinity\n"
        "GPU0\t X \tPIX\tSOC\t0-9\nGPU1\tPIX\t X \tSOC\t0-9\nmlx4_0\tSOC\tSOC\t X \t\n"
    )
    matrix = parse_topo_matrix(old)
    assert matrix.nics == (("mlx4_0", "mlx4_0"),)
    assert [link.label for link in matrix.links] == ["PIX", "SYS", "SYS"]
    assert [gpu.numa_node for gpu in matrix.gpus] == [NUMA_UNKNOWN, NUMA_UNKNOWN]


GOOD = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-3\t0\nGPU1\tNV4\t X \t4-7\t1\n"


@pytest.mark.parametrize(
    ("broken", "line", "says"),
    [
        ("", 0, "no header line"),
        ("command not found\n", 0, "no header line"),
        (GOOD.replace("GPU0\t X \tNV4", "GPU0\t X \tNVX"), 2, "'NVX' is no link class. Allowed: NV#, PIX"),
        (GOOD.replace("GPU0\t X \tNV4", "GPU0\t X \tNV0"), 2, "'NV0' is no link class"),
        (GOOD.replace("GPU1\tNV4", "GPU1\tNV2"), 3, "GPU1 to GPU0 is NV2, but line 2 says NV4"),
        (GOOD.replace("GPU0\t X ", "GPU0\tPIX"), 2, "GPU0 to itself is 'PIX', not X"),
        (GOOD.replace("GPU1\tNV4\t X \t4-7\t1\n", ""), 1, "GPU1 is in the header but has no row"),
        (GOOD.replace("GPU1\tNV4\t X \t4-7\t1", "GPU1\tNV4"), 3, "GPU1 has 1 cells, the header has 2 names"),
        (GOOD.replace("GPU1\tNV4", "GPU0\tNV4"), 3, "GPU0 has a second row, the first is line 2"),
        (GOOD.replace("GPU1\tNV4", "GPU7\tNV4"), 3, "starts with one of the header's names (GPU0, GPU1)"),
        (GOOD.replace("\tGPU0\tGPU1", "\tGPU0\tGPU0"), 1, "a name stands twice"),
        (GOOD.replace("0-3", "0:3"), 2, "CPU affinity '0:3' is no list"),
        (GOOD.replace("4-7\t1", "4-7\tleft"), 3, "NUMA affinity 'left' is no NUMA node"),
    ],
)
def test_garbage_is_named_with_its_line(broken: str, line: int, says: str) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topo_matrix(broken)
    assert caught.value.line == line
    assert says in str(caught.value)
    if line:
        assert caught.value.text == broken.splitlines()[line - 1]
        assert f"line {line}" in str(caught.value)


@given(st.sets(st.integers(0, 200), max_size=30))
def test_cpu_lists_go_both_ways(cpus: set[int]) -> None:
    rising = tuple(sorted(cpus))
    assert cpu_list(cpu_ranges(rising)) == rising
    assert cpu_list(" ".join(map(str, rising))) == rising


@pytest.mark.parametrize("bad", ["a", "3-1", "1-", "0-99999999", "1;2"])
def test_what_is_no_cpu_list(bad: str) -> None:
    assert cpu_list(bad) is None
