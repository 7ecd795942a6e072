"""Images of sequences: what was packed is found again, and nothing else is taken for one."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.decoding.image import MAGIC, ImageRefused, packed, unpacked

PAGES = bytes(range(64)) * 2
IMAGE = packed(b"state", 32, PAGES)


@given(st.binary(max_size=50), st.integers(1, 40), st.integers(0, 5), st.randoms(use_true_random=False))
def test_what_was_packed_is_found_again(state: bytes, size: int, count: int, random: object) -> None:
    pages = random.randbytes(size * count)  # type: ignore[attr-defined]
    found = unpacked(bytearray(packed(state, size, pages)))
    assert (found.state, found.page_bytes, bytes(found.pages), found.count) == (state, size, pages, count)


def test_a_sequence_of_which_nothing_was_computed_has_no_pages() -> None:
    assert unpacked(packed(b"s", 0, b"")).count == 0
    with pytest.raises(ValueError, match="whole number"):
        packed(b"s", 32, b"half a page")


@given(st.integers(0, len(IMAGE) - 1), st.integers(1, 255))
def test_one_altered_byte_anywhere_is_refused(place: int, change: int) -> None:
    altered = bytearray(IMAGE)
    altered[place] ^= change
    with pytest.raises(ImageRefused):
        unpacked(altered)


@given(st.integers(0, len(IMAGE) - 1))
def test_one_that_was_cut_off_is_refused(length: int) -> None:
    with pytest.raises(ImageRefused) as refused:
        unpacked(IMAGE[:length])
    assert refused.value.code == "image_damaged"


@given(st.binary(max_size=300))
def test_garbage_is_refused(garbage: bytes) -> None:
    for image in (garbage, MAGIC + garbage, IMAGE + garbage + b"x"):
        with pytest.raises(ImageRefused):
            unpacked(image)


def test_another_version_is_named() -> None:
    other = IMAGE[:8] + struct.pack("<H", 7) + IMAGE[10:]
    with pytest.raises(ImageRefused, match="version 7, this engine reads version 1") as refused:
        unpacked(other)
    assert refused.value.code == "image_version"


def test_a_damaged_page_is_named() -> None:
    altered = bytearray(IMAGE)
    altered[-1] ^= 1
    with pytest.raises(ImageRefused, match="page 3 of 4"):
        unpacked(altered)
