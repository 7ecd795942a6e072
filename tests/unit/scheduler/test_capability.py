"""Which precision x context x tensor-parallel size fits which device class: the arithmetic, and that it is monotone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from scheduler.capability import (
    MIB,
    RUNTIME_BYTES,
    WEIGHT_BITS,
    Architecture,
    Fit,
    Footprint,
    best_fit,
    capability_matrix,
    contexts,
    fit,
    footprint,
    sizes,
    weights_bytes,
)
from scheduler.capability_words import matrix_rows, matrix_sentences
from scheduler.device_classes import PRECISIONS, DeviceClass, classes_of, precisions_of
from sie_stream.errors import ConfigError
from sie_stream.spec import ModelSpec
from sie_stream.spec.model import Precision
from tests.examples import examples
from tests.unit.topology.machines import MACHINES, topology

GIB = 1024 * MIB
LLAMA_8B = Architecture(8_030_261_248, 32, 8, 128)
A100 = DeviceClass("A100", "cuda", 40 * GIB, precisions_of("cuda", "NVIDIA A100-SXM4-40GB"), 8, 8)
H100 = DeviceClass("H100", "cuda", 80 * GIB, PRECISIONS, 8, 8)
CPU = DeviceClass("cpu", "cpu", 16 * GIB, precisions_of("cpu", "cpu"))


def spec(**changes: Any) -> ModelSpec:
    body = {
        "name": "llama",
        "version": "1",
        "source": {"uri": "m"},
        "min_gpu_memory_mb": 20_480,
        "service_type": "text-generation",
        "preferred_precision": ["bf16", "int8"],
        "supported_context_length": 8192,
    }
    return ModelSpec.model_validate(body | changes)


def test_the_arithmetic_of_llama_8b() -> None:
    cell = fit(footprint(spec(), LLAMA_8B), A100, "bf16", 8192, 1)
    assert cell.weights_bytes == 2 * 8_030_261_248
    assert cell.kv_bytes == 2 * 32 * 8 * 128 * 2 * 8192 == GIB, "128 KiB per token"
    assert cell.workspace_bytes == RUNTIME_BYTES["cuda"] + cell.weights_bytes * 5 // 100
    assert (cell.need_bytes, cell.verdict) == (cell.weights_bytes + cell.kv_bytes + cell.workspace_bytes, "fits")
    assert cell.contexts_at_once == (40 * GIB - cell.weights_bytes - cell.workspace_bytes) // GIB == 23


def test_two_devices_share_weights_and_heads() -> None:
    needs = footprint(spec(), LLAMA_8B)
    one, two, sixteen = (fit(needs, A100, "bf16", 8192, size) for size in (1, 2, 16))
    assert (two.weights_bytes, two.kv_bytes) == (one.weights_bytes // 2, one.kv_bytes // 2)
    assert sixteen.kv_bytes == one.kv_bytes // 8, "8 KV heads are copied, not cut"
    assert two.workspace_bytes > RUNTIME_BYTES["cuda"], "each device has its own runtime"


def test_quantised_weights_carry_scales_and_a_16_bit_cache() -> None:
    needs = footprint(spec(), LLAMA_8B)
    assert weights_bytes(1280, "int8") == 1280 + 10 * 2
    assert weights_bytes(1281, "int4") == 641 + 11 * 2
    assert fit(needs, H100, "int4", 8192, 1).kv_bytes == fit(needs, H100, "bf16", 8192, 1).kv_bytes
    assert fit(needs, CPU, "fp32", 8192, 1).kv_bytes == 2 * GIB


def test_a_context_that_needs_the_whole_card_makes_it_exclusive() -> None:
    """15.0 GiB of weights and 1.2 GiB of workspace; 131,072 tokens take 16 GiB more, half of them half of that."""
    card = structs.replace(A100, memory_bytes=34 * GIB, group_max=1)
    matrix = capability_matrix(spec(supported_context_length=131_072, preferred_precision=["bf16"]), [card], LLAMA_8B)
    verdicts = {cell.context_tokens: cell.verdict for cell in matrix.fits}
    assert (verdicts[131_072], verdicts[65_536]) == ("exclusive", "fits")
    assert matrix.fits[0].contexts_at_once == 1
    assert matrix_rows(matrix)[0]["exclusive_from"] == "131072"


def test_verdicts() -> None:
    needs = footprint(spec(), LLAMA_8B)

    def says(cell: Fit) -> tuple[str, str]:
        return cell.verdict, cell.why

    assert says(fit(needs, A100, "fp8", 8192, 1)) == (
        "impossible", "A100 does not compute fp8, only fp32, bf16, fp16, int8, int4."
    )  # fmt: skip
    assert says(fit(needs, CPU, "bf16", 8192, 2)) == ("impossible", "a server has at most 1 of cpu, 2 are needed.")
    assert says(fit(needs, A100, "bf16", 8192, 3)) == ("impossible", "8 KV heads do not divide over 3 devices.")
    assert fit(needs, CPU, "bf16", 8192, 1).verdict == "too_big"
    assert "has 17179869184." in fit(needs, CPU, "bf16", 8192, 1).why
    pairs = structs.replace(A100, island_max=2)
    assert says(fit(needs, pairs, "bf16", 8192, 4)) == ("fits", "4 devices span NVLink islands of 2: slower.")


# ---------------------------------------------------------------- properties

footprints = st.builds(
    Footprint,
    parameters=st.integers(1, 400_000_000_000),
    kv_elements_per_token=st.integers(0, 2_000_000),
    kv_heads=st.sampled_from([0, 1, 2, 4, 8, 16, 32]),
    context_max=st.just(0),
    runtime_bytes=st.none() | st.integers(0, 2 * GIB),
)
classes = st.builds(
    DeviceClass,
    name=st.just("x"),
    kind=st.sampled_from(["cuda", "mig", "cpu"]),
    memory_bytes=st.integers(1, 200 * GIB),
    precisions=st.just(PRECISIONS),
    group_max=st.just(64),
    island_max=st.sampled_from([1, 8, 64]),
)
ORDER = {"fits": 0, "exclusive": 1, "too_big": 2}
powers = st.sampled_from([1, 2, 4, 8, 16])
tokens = st.integers(0, 2_000_000)


@examples(50)
@given(footprints, classes, st.sampled_from(PRECISIONS), tokens, powers, st.integers(0, 100 * GIB))
def test_more_memory_never_fits_worse(
    needs: Footprint, on: DeviceClass, precision: Precision, length: int, size: int, more: int
) -> None:
    small = fit(needs, on, precision, length, size)
    large = fit(needs, structs.replace(on, memory_bytes=on.memory_bytes + more), precision, length, size)
    assert ORDER[large.verdict] <= ORDER[small.verdict]
    assert large.need_bytes == small.need_bytes
    assert large.contexts_at_once >= small.contexts_at_once


@examples(50)
@given(footprints, classes, st.sampled_from(PRECISIONS), tokens, tokens, powers)
def test_a_shorter_context_never_fits_worse(
    needs: Footprint, on: DeviceClass, precision: Precision, one: int, other: int, size: int
) -> None:
    short, long = (fit(needs, on, precision, length, size) for length in sorted((one, other)))
    assert ORDER[short.verdict] <= ORDER[long.verdict]
    assert short.need_bytes <= long.need_bytes


@examples(50)
@given(footprints, classes, st.sampled_from(PRECISIONS), st.sampled_from(PRECISIONS), tokens, powers)
def test_fewer_bits_never_fit_worse(
    needs: Footprint, on: DeviceClass, one: Precision, other: Precision, length: int, size: int
) -> None:
    small, large = sorted((one, other), key=lambda precision: WEIGHT_BITS[precision])
    if WEIGHT_BITS[small] < WEIGHT_BITS[large] and needs.parameters >= 128:
        a, b = fit(needs, on, small, length, size), fit(needs, on, large, length, size)
        assert a.need_bytes <= b.need_bytes
        assert ORDER[a.verdict] <= ORDER[b.verdict]


@examples(50)
@given(footprints, classes, st.sampled_from(PRECISIONS), tokens)
def test_more_devices_never_need_more_of_each(
    needs: Footprint, on: DeviceClass, precision: Precision, length: int
) -> None:
    cells = [fit(needs, on, precision, length, size) for size in (1, 2, 4, 8, 16)]
    assert [cell.need_bytes for cell in cells] == sorted((cell.need_bytes for cell in cells), reverse=True)


@examples(50)
@given(footprints, classes, st.sampled_from(PRECISIONS), tokens, powers)
def test_the_verdict_is_about_the_sum(
    needs: Footprint, on: DeviceClass, precision: Precision, length: int, size: int
) -> None:
    cell = fit(needs, on, precision, length, size)
    assert (cell.verdict == "too_big") == (cell.need_bytes > on.memory_bytes)
    whole = cell.need_bytes * 100 >= on.memory_bytes * 90
    assert (cell.verdict == "exclusive") == (whole and cell.need_bytes <= on.memory_bytes)
    assert cell.possible == (cell.verdict in ("fits", "exclusive"))


@examples(50)
@given(
    st.integers(1, 2_000_000),
    st.sampled_from(PRECISIONS),
    st.none() | st.integers(1, 1_000_000),
    st.sampled_from(["text-generation", "classification"]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_what_is_derived_gives_the_declared_memory_back(
    megabytes: int, precision: Precision, length: int | None, service: str, size: int
) -> None:
    declared = spec(
        min_gpu_memory_mb=megabytes,
        preferred_precision=[precision],
        supported_context_length=length,
        service_type=service,
        tensor_parallel_size=size,
    )
    needs = footprint(declared)
    cell = fit(needs, structs.replace(H100, memory_bytes=2**50), precision, needs.context_max, size)
    assert cell.need_bytes * size <= megabytes * MIB + 2 * (size - 1)
    longest = needs.context_max or length or 0
    rounding = longest * 4 + 4096  # one cache entry, a few weights
    assert cell.need_bytes * size >= megabytes * MIB - rounding
    assert needs.assumptions[0].startswith("The architecture is not declared")


# ---------------------------------------------------------------- the matrix


def test_the_matrix_has_every_combination_in_order() -> None:
    matrix = capability_matrix(spec(), [A100, CPU], LLAMA_8B)
    assert contexts(8192) == (8192, 4096, 2048, 1024)
    assert len(matrix.fits) == (4 + 1) * 2 * 4, "sizes 1, 2, 4, 8 on A100, 1 on cpu"
    first = [(c.device_class, c.tensor_parallel, c.precision, c.context_tokens) for c in matrix.fits[:5]]
    assert first == [("A100", 1, "bf16", 8192), ("A100", 1, "bf16", 4096), ("A100", 1, "bf16", 2048),
                     ("A100", 1, "bf16", 1024), ("A100", 1, "int8", 8192)]  # fmt: skip
    assert matrix.assumptions == ()


@pytest.mark.parametrize(
    ("longest", "shown"),
    [(0, (0,)), (512, (512,)), (1024, (1024,)), (1025, (1025, 1024)), (5000, (5000, 4096, 2048, 1024))],
)
def test_contexts_shown(longest: int, shown: tuple[int, ...]) -> None:
    assert contexts(longest) == shown


def test_sizes_shown_include_the_declared_one() -> None:
    assert sizes(A100, 1) == (1, 2, 4, 8)
    assert sizes(structs.replace(A100, group_max=6), 6) == (1, 2, 4, 6)
    assert sizes(CPU, 2) == (1, 2), "it is impossible there, and the matrix says so"


def test_best_fit_takes_the_best_precision_that_holds_the_context() -> None:
    small = structs.replace(A100, memory_bytes=17 * GIB)
    matrix = capability_matrix(spec(), [small], LLAMA_8B)
    chosen = best_fit(matrix, "A100", 1)
    assert chosen is not None
    assert (chosen.precision, chosen.context_tokens) == ("bf16", 4096)
    longer = best_fit(matrix, "A100", 1, 8192)
    assert longer is not None
    assert (longer.precision, longer.context_tokens) == ("int8", 8192)
    assert best_fit(matrix, "A100", 1, 8193) is None
    assert best_fit(matrix, "H100", 1) is None


def test_the_declaration_may_tell_the_architecture() -> None:
    config = {"num_parameters": 1_000, "num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 4}
    told = footprint(spec(backend={"name": "torch", "config": config}))
    assert (told.parameters, told.kv_elements_per_token, told.kv_heads, told.context_max) == (1_000, 48, 3, 8192)
    assert told.assumptions == ()
    weights_only = footprint(spec(backend={"name": "torch", "config": {"num_parameters": 1_000}}))
    assert (weights_only.kv_elements_per_token, weights_only.context_max) == (0, 0)
    with pytest.raises(ConfigError, match=r"num_hidden_layers given without num_key_value_heads, head_dim"):
        footprint(spec(backend={"name": "torch", "config": {"num_parameters": 1, "num_hidden_layers": 2}}))
    with pytest.raises(ConfigError, match=r"backend\.config\.num_parameters: '8B', a whole number"):
        footprint(spec(backend={"name": "torch", "config": {"num_parameters": "8B"}}))


def test_the_longest_context_is_the_smaller_of_the_two_declared() -> None:
    assert footprint(spec(max_seq_len=2048), LLAMA_8B).context_max == 2048
    assert footprint(spec(supported_context_length=None), LLAMA_8B).context_max == 0


def test_assumptions_are_said() -> None:
    said = " ".join(capability_matrix(spec(preferred_precision=[]), [A100]).assumptions)
    assert "min_gpu_memory_mb 20480 is taken as weights, KV cache and workspace at bf16" in said
    assert "25 % of it is taken as the KV cache of 8192 tokens" in said
    assert "No preferred_precision is declared: bf16" in said
    lora = {"base": "llama", "rank": 8}
    served = capability_matrix(spec(lora=lora, name="support", backend={"name": "vllm"}), [A100])
    assert "This is an adapter: the weights of its base llama are not counted." in served.assumptions
    ours = capability_matrix(spec(lora=lora, name="support", backend={"name": "torch"}), [A100])
    assert "its engine holds the weights of its base llama, too" in " ".join(ours.assumptions)


# ---------------------------------------------------------------- words


def test_rows_have_one_line_per_class_size_and_precision() -> None:
    small = [structs.replace(A100, memory_bytes=17 * GIB, group_max=1), structs.replace(CPU, memory_bytes=12 * GIB)]
    rows = matrix_rows(capability_matrix(spec(), small, LLAMA_8B))
    assert [(r["device_class"], r["precision"], r["context"], r["exclusive_from"], r["verdict"]) for r in rows] == [
        ("A100", "bf16", "4096", "1024", "exclusive"),
        ("A100", "int8", "8192", "", "fits"),
        ("cpu", "bf16", "", "", "too big"),
        ("cpu", "int8", "8192", "", "fits"),
    ]
    assert rows[1]["memory"] == "7.5 GiB weights + 1.0 GiB KV of 8192 tokens + 900 MiB workspace = 9.4 GiB of 17.0 GiB"
    assert rows[1]["need_bytes"] == sum(int(rows[1][f"{part}_bytes"]) for part in ("weights", "kv", "workspace"))


def test_sentences() -> None:
    small = DeviceClass("T4", "cuda", 16 * GIB, precisions_of("cuda", "Tesla T4"))
    matrix = capability_matrix(spec(tensor_parallel_size=2), [structs.replace(A100, group_max=2), small], LLAMA_8B)
    said = matrix_sentences(matrix)
    assert said[0].startswith("A100, bf16: fits up to 8192 tokens. 14.9 GiB weights + 1.0 GiB KV of 8192 tokens + ")
    assert said[0].endswith(" = 17.2 GiB of 40.0 GiB. 23 such contexts at once.")
    assert said[2].startswith("2 x A100, bf16: fits up to 8192 tokens. 7.4 GiB weights + 512 MiB KV")
    assert " of 40.0 GiB each. " in said[2]
    assert "T4, bf16: no. T4 does not compute bf16, only fp32, fp16, int8, int4." in said
    assert "2 x T4, int8: no. a server has at most 1 of T4, 2 are needed." in said


def test_a_classical_model_has_no_context() -> None:
    churn = spec(service_type="scoring", min_gpu_memory_mb=512, preferred_precision=[], supported_context_length=None)
    (row,) = matrix_rows(capability_matrix(churn, [CPU]))
    assert (row["context"], row["exclusive_from"], row["verdict"], row["kv_bytes"]) == ("", "", "fits", 0)
    (sentence,) = [line for line in matrix_sentences(capability_matrix(churn, [CPU])) if line.startswith("cpu")]
    assert sentence.startswith("cpu, fp32: fits. ")
    assert "KV" not in sentence


# ---------------------------------------------------------------- device classes


def test_classes_of_a_mixed_fleet() -> None:
    found = classes_of([topology(machine) for machine in MACHINES])
    by_name = {device_class.name: device_class for device_class in found}
    assert (by_name["NVIDIA A100-SXM4-40GB"].group_max, by_name["NVIDIA A100-SXM4-40GB"].island_max) == (8, 8)
    assert (by_name["NVIDIA A100 80GB PCIe"].group_max, by_name["NVIDIA A100 80GB PCIe"].island_max) == (4, 2)
    assert (by_name["NVIDIA L40S"].group_max, by_name["NVIDIA L40S"].island_max) == (4, 1)
    assert by_name["NVIDIA A100-SXM4-40GB MIG 3g.20gb"].kind == "mig"
    assert by_name["cpu (125.0 GiB)"].kind == "cpu", "names tell sizes apart where there are several"
    assert [c.memory_bytes // GIB for c in found if c.kind == "cpu"] == [125, 251, 1007], (
        "a node's odd bytes make no class"
    )
    assert classes_of([topology(machine) for machine in reversed(MACHINES)]) == found


@pytest.mark.parametrize(
    ("product", "bf16", "fp8"),
    [
        ("NVIDIA H100 80GB HBM3", True, True),
        ("NVIDIA L40S", True, True),
        ("NVIDIA L4", True, True),
        ("NVIDIA GeForce RTX 4090", True, True),
        ("NVIDIA RTX 6000 Ada Generation", True, True),
        ("NVIDIA A100-SXM4-40GB", True, False),
        ("NVIDIA A10G", True, False),
        ("NVIDIA RTX A6000", True, False),
        ("Tesla T4", False, False),
        ("Tesla V100-SXM2-16GB", False, False),
        ("Something New", False, False),
    ],
)
def test_precisions_by_product(product: str, bf16: bool, fp8: bool) -> None:
    found = precisions_of("cuda", product)
    assert ("bf16" in found, "fp8" in found) == (bf16, fp8)
    assert {"fp32", "fp16", "int8"} <= set(found)
