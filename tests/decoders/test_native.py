"""Compiled C files are kept under a name that says from what they were made."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from gpu_worker.backends.decoder import native

COMPILER = shutil.which("gcc") or shutil.which("cc") or ""
pytestmark = pytest.mark.skipif(not COMPILER, reason="no C compiler here")


def source(folder: Path, answer: int) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "file.c"
    file.write_text(f"int answer(void) {{ return {answer}; }}\n")
    return file


def answer(library: ctypes.CDLL | None) -> int:
    assert library is not None
    return library.answer()


def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, kept = source(tmp_path, 7), tmp_path / "kept"
    assert answer(native.built(file, COMPILER, kept)) == 7
    assert len(list(kept.iterdir())) == 1
    monkeypatch.setattr(native.subprocess, "run", None)  # a second compilation would call it
    assert answer(native.built(file, COMPILER, kept)) == 7


def test_what_was_kept_is_not_taken_for_another_source_or_other_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    assert answer(native.built(source(tmp_path, 7), COMPILER, kept)) == 7
    assert answer(native.built(source(tmp_path, 8), COMPILER, kept)) == 8
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O1"))
    native.built(source(tmp_path, 8), COMPILER, kept)
    assert len(list(kept.iterdir())) == 3


def test_half_a_file_is_made_anew_and_a_failing_compiler_makes_none(tmp_path: Path) -> None:
    file, kept = source(tmp_path, 7), tmp_path / "kept"
    other = tmp_path / "other"
    native.built(file, COMPILER, other)
    (made,) = other.iterdir()
    kept.mkdir()
    (kept / made.name).write_bytes(made.read_bytes()[:100])
    assert answer(native.built(file, COMPILER, kept)) == 7
    file.write_text("no C\n")
    assert native.built(file, COMPILER, kept) is None


def test_a_home_that_cannot_be_written_to_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    native.library_of.cache_clear()
    try:
        assert answer(native.library_of(source(tmp_path / "sources", 9))) == 9
    finally:
        native.library_of.cache_clear()
