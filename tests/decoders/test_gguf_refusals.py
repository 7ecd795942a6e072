"""GGUF files that are damaged or lack what a network needs: refused in words, never read beyond their end."""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.decoder.files import files_of
from gpu_worker.backends.decoder.shape import shape_of
from gpu_worker.backends.gguf_file import GgufFile

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
FORMS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}
ROWS, WIDTH = 8, 32
GOOD: dict[str, tuple[int, Any]] = {
    "general.architecture": (STRING, "llama"),
    "general.alignment": (U32, 32),
    "llama.embedding_length": (U32, WIDTH),
    "llama.feed_forward_length": (U32, 64),
    "llama.block_count": (U32, 1),
    "llama.attention.head_count": (U32, 4),
    "llama.attention.head_count_kv": (U32, 2),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.context_length": (U32, 64),
    "llama.rope.freq_base": (F32, 10_000.0),
    "tokenizer.ggml.tokens": (ARRAY, ["word"] * ROWS),
    "tokenizer.ggml.eos_token_id": (U32, 2),
}
Tensor = tuple[str, tuple[int, ...], int, int]
"""Name, sizes in ggml's order, type, offset."""
TENSORS: tuple[Tensor, ...] = (
    ("token_embd.weight", (WIDTH, ROWS), 0, 0),
    ("blk.0.attn_q.weight", (WIDTH, WIDTH), 1, 1024),
)
DATA = 1024 + 2048


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def value_of(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        return struct.pack("<IQ", STRING, len(value)) + b"".join(map(text, value))
    return struct.pack(FORMS[kind], value)


def gguf(
    metadata: dict[str, tuple[int, Any]] | None = None,
    tensors: tuple[Tensor, ...] = TENSORS,
    more: bytes = b"",
    counts: tuple[int, int] | None = None,
) -> bytes:
    """`more`: one more entry of the metadata, as it stands in the file. counts: what the header says of both kinds."""
    entries = GOOD if metadata is None else metadata
    keys = b"".join(
        text(key) + struct.pack("<I", kind) + value_of(kind, value) for key, (kind, value) in entries.items()
    )
    told = b"".join(
        text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
        for name, sizes, kind, offset in tensors
    )
    said = counts or (len(tensors), len(entries) + bool(more))
    header = struct.pack("<4sIQQ", b"GGUF", 3, *said) + keys + more + told
    return header + bytes(-len(header) % 32) + bytes(DATA)


def read(content: bytes, folder: Path) -> GgufFile:
    """All that is read before a network is made."""
    path = folder / "a.gguf"
    path.write_bytes(content)
    files = files_of(path)
    shape_of(files.config)
    file = GgufFile(path)
    for name in file.entries:
        file.tensor(name)
    return file


def refusal(content: bytes, folder: Path) -> str:
    with pytest.raises(ModelRefused) as raised:
        read(content, folder)
    return raised.value.message


def changed(key: str, kind: int, value: Any) -> bytes:
    return gguf({**GOOD, key: (kind, value)})


def test_the_file_that_the_others_are_made_of_is_read(tmp_path: Path) -> None:
    assert read(gguf(), tmp_path).tensor("token_embd.weight").shape == (ROWS, WIDTH)


def test_a_file_that_ends_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = gguf()
    for size in [*range(len(whole) - DATA + 40), len(whole) - 1]:
        assert "cannot read" in refusal(whole[:size], tmp_path)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (("t", (WIDTH, ROWS), 0, 1 << 40), "tensor t with sizes (8, 32) ends at byte"),
        (("t", (WIDTH, ROWS), 0, (1 << 64) - 32), "ends at byte"),
        (("t", (WIDTH, ROWS), 0, 7), "tensor t begins at byte 7, which is no multiple of 32"),
        (("t", (WIDTH, ROWS), 99, 0), "type 99, which is not one of 0, 1, 2, 3,"),
        (("t", (WIDTH, 0), 0, 0), "none may be 0"),
        (("t", (0, ROWS), 0, 0), "none may be 0"),
        (("t", (WIDTH, 1 << 63), 0, 0), "ends at byte"),
        (("t", (33, 4), 2, 0), "32 must divide the last"),
        (("t", (1, 1, 1, 1, 1), 0, 0), "tensor t has 5 dimensions"),
        (("t", (), 0, 0), "tensor t has sizes ()"),
    ],
)
def test_a_tensor_that_is_not_in_the_file_is_refused_by_name(tensor: Tensor, said: str, tmp_path: Path) -> None:
    assert said in refusal(gguf(tensors=(*TENSORS, tensor)), tmp_path)


def array(kind: int, count: int) -> bytes:
    return text("long") + struct.pack("<IIQ", ARRAY, kind, count)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (array(U32, 1 << 62), "metadata long has 4611686018427387904 values, more than the file"),
        (array(U64, (1 << 64) - 1), "more than the file"),
        (array(STRING, 1 << 60), "more than the file"),
        (array(ARRAY, 1), "metadata long is an array of type 9"),
        (array(77, 1), "metadata long is an array of type 77"),
        (array(STRING, 1) + struct.pack("<Q", (1 << 64) - 1), "metadata long ends after the file"),
        (text("odd") + struct.pack("<I", 77), "metadata odd is of type 77"),
        (text("odd") + struct.pack("<IQ", STRING, (1 << 64) - 1), "ends after the file"),
        (struct.pack("<Q", 1 << 50), "ends after the file"),
    ],
)
def test_lengths_beyond_the_file_are_refused(more: bytes, said: str, tmp_path: Path) -> None:
    assert said in refusal(gguf(more=more), tmp_path)


@pytest.mark.parametrize("counts", [(2, 1 << 63), (1 << 63, len(GOOD)), (2, len(GOOD) + 1)])
def test_counts_beyond_the_file_are_refused(counts: tuple[int, int], tmp_path: Path) -> None:
    assert "cannot read" in refusal(gguf(counts=counts), tmp_path)


@pytest.mark.parametrize("alignment", [(U32, 0), (I32, -32), (STRING, "x"), (F32, 32.0), (BOOL, True)])
def test_an_alignment_that_is_none_is_refused(alignment: tuple[int, Any], tmp_path: Path) -> None:
    assert "general.alignment is" in refusal(changed("general.alignment", *alignment), tmp_path)


SIZES = sorted(key for key in GOOD if key.startswith("llama."))
OPTIONAL = ("llama.attention.head_count_kv", "llama.rope.freq_base")


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize(
    "value", [(U32, 0), (I32, -4), (STRING, "four"), (BOOL, True), (ARRAY, ["4"]), (F32, math.nan)]
)
def test_a_size_that_is_none_is_refused_with_key_and_value(key: str, value: tuple[int, Any], tmp_path: Path) -> None:
    said = refusal(changed(key, *value), tmp_path)
    assert f"{key} is " in said
    assert "must be a" in said


@pytest.mark.parametrize("key", [key for key in SIZES if key not in OPTIONAL])
def test_a_size_that_is_missing_is_refused(key: str, tmp_path: Path) -> None:
    said = refusal(gguf({name: value for name, value in GOOD.items() if name != key}), tmp_path)
    assert f"{key} is missing" in said


def test_what_llama_cpp_does_without_means_what_it_means_there(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf({name: value for name, value in GOOD.items() if name not in OPTIONAL}))
    config = files_of(tmp_path / "a.gguf").config
    assert (config.num_key_value_heads, config.head_dim, config.rope["rope_theta"]) == (4, 8, 10_000.0)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (
            "tokenizer.ggml.tokens",
            (ARRAY, ["word"] * 9),
            "is 9 tokens; it must be as many as token_embd.weight has rows, 8",
        ),
        ("tokenizer.ggml.tokens", (ARRAY, ["word"] * 7), "is 7 tokens"),
        ("tokenizer.ggml.eos_token_id", (STRING, "</s>"), "eos_token_id is </s>; it must be a token id"),
        ("tokenizer.ggml.eot_token_id", (I32, -1), "eot_token_id is -1"),
        ("llama.attention.head_count", (U32, 5), "head_count is 5; it must be a divisor of the embedding_length, 32"),
        ("llama.attention.head_count_kv", (U32, 3), "4 attention heads of width 8, 3 of keys and values"),
        ("llama.attention.key_length", (U32, 7), "4 attention heads of width 7"),
        ("llama.attention.value_length", (U32, 16), "value_length is 16; it must be the width of a head, 8"),
        ("llama.rope.dimension_count", (U32, 4), "rope.dimension_count is 4; it must be the width of a head, 8"),
        ("llama.rope.freq_base", (F32, math.inf), "freq_base is inf; it must be a finite number > 0"),
        ("llama.block_count", (U32, 1 << 31), "num_hidden_layers"),
        ("general.architecture", (STRING, "lama"), "general.architecture: model_type 'lama' is not one of llama"),
        ("general.architecture", (U32, 7), "'7' is not one of llama"),
    ],
)
def test_what_does_not_go_together_is_refused(key: str, value: tuple[int, Any], said: str, tmp_path: Path) -> None:
    assert said in refusal(changed(key, *value), tmp_path)


@pytest.mark.parametrize(
    ("factor", "said"), [(None, "is missing"), ((F32, 0.0), "is 0.0"), ((STRING, "two"), "is two")]
)
def test_a_rope_scaling_without_its_factor_is_refused(
    factor: tuple[int, Any] | None, said: str, tmp_path: Path
) -> None:
    scaled = {**GOOD, "llama.rope.scaling.type": (STRING, "linear")}
    if factor is not None:
        scaled["llama.rope.scaling.factor"] = factor
    found = refusal(gguf(scaled), tmp_path)
    assert "llama.rope.scaling.factor" in found
    assert said in found


def test_without_an_embedding_there_is_no_network(tmp_path: Path) -> None:
    assert "tensor token_embd.weight is missing" in refusal(gguf(tensors=TENSORS[1:]), tmp_path)
    flat = ("token_embd.weight", (WIDTH * ROWS,), 0, 0)
    assert "token_embd.weight is of sizes (256,)" in refusal(gguf(tensors=(flat,)), tmp_path)


def test_a_tensor_with_a_short_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf(tensors=(*TENSORS, ("blk.weight", (4,), 0, 0), ("blk", (4,), 0, 0))))
    with files_of(tmp_path / "a.gguf").tensors() as tensors:
        assert "model.embed_tokens.weight" in tensors
        assert "model.layers.0.self_attn.q_proj.weight" in tensors


WHOLE = gguf()


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - DATA - 1), st.integers(0, 255)), min_size=1, max_size=4))
@example([(len(WHOLE) - DATA - 40, 255)])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_bytes_of_a_header_are_wrong_the_file_is_read_or_refused(
    tmp_path: Path, damage: list[tuple[int, int]]
) -> None:
    content = bytearray(WHOLE)
    for place, byte in damage:
        content[place] = byte
    with suppress(ModelRefused):
        read(bytes(content), tmp_path)
