"""Objects behind references: read only inside their places, bounded, and written once."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations

from sie_stream.edge import reference_store
from sie_stream.edge.reference_store import StoreUnavailable, describe, put, read
from sie_stream.errors import ConfigError, InvalidRequest
from sie_stream.records import InputsRef
from sie_stream.references import place_of

CONTENT = b'{"x": 1}'
DIGEST = sha256(CONTENT).hexdigest()


def refusal(url: str, *places: str, bytes_max: int = 1_000) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(InputsRef(url, DIGEST), places, bytes_max)
    return caught.value


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(CONTENT)
    place = place_of(str(tmp_path))
    assert read(InputsRef(f"{place}a.json", DIGEST, len(CONTENT)), (place,), 1_000) == CONTENT
    assert refusal(f"{place}a.json", place, bytes_max=7).code == "reference_too_large"
    (tmp_path / "a.json").write_bytes(b'{"x": 2}')
    assert refusal(f"{place}a.json", place).code == "reference_mismatch"


def test_an_object_of_another_store_is_read() -> None:
    fsspec.filesystem("memory").pipe_file("/in/a.json", CONTENT)
    assert read(InputsRef("memory://in/a.json", DIGEST), ("memory://in/",), 1_000) == CONTENT
    assert refusal("memory://in/b.json", "memory://in/").code == "reference_missing"


def test_what_is_no_file_is_missing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    place = place_of(str(tmp_path))
    (tmp_path / "a.json").write_bytes(CONTENT)
    (tmp_path / "loop").symlink_to("loop")
    for name in ("folder", "pipe", "nothing", "nothing/below", "a.json/below", "loop", "a" * 300):
        assert refusal(place + name, place).code == "reference_missing"


def test_links_do_not_lead_out(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.json").write_bytes(CONTENT)
    (inside / "link.json").symlink_to(outside / "a.json")
    (inside / "folder").symlink_to(outside)
    (inside / "good.json").symlink_to(inside / "a.json")
    place = place_of(str(inside))
    assert refusal(f"{place}link.json", place).code == "reference_not_allowed"
    assert refusal(f"{place}folder/a.json", place).code == "reference_not_allowed"
    assert read(InputsRef(f"{place}good.json", DIGEST), (place,), 1_000) == CONTENT


@pytest.mark.parametrize("kind", ["link", "pipe", "the same"])
def test_a_file_that_is_replaced_between_look_and_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whoever may send references may often write to their place, too."""
    inside, outside = tmp_path / "in", tmp_path / "out.json"
    inside.mkdir()
    outside.write_bytes(CONTENT)
    path, isfile = inside / "a.json", reference_store.isfile
    path.write_bytes(CONTENT)
    looks: list[str] = []

    def look_and_replace(real: str) -> bool:
        found = isfile(real)
        looks.append(real)
        if len(looks) == 1:
            path.unlink()
            match kind:
                case "link":
                    path.symlink_to(outside)
                case "pipe":
                    os.mkfifo(path)
                case _:
                    path.write_bytes(CONTENT)
        return found

    monkeypatch.setattr(reference_store, "isfile", look_and_replace)
    place = place_of(str(inside))
    if kind == "the same":
        assert read(InputsRef(f"{place}a.json", DIGEST), (place,), 1_000) == CONTENT
    else:
        expected = {"link": "reference_not_allowed", "pipe": "reference_missing"}
        assert refusal(f"{place}a.json", place).code == expected[kind]


def test_a_place_may_be_a_link_itself(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.json").write_bytes(CONTENT)
    (tmp_path / "place").symlink_to(tmp_path / "real")
    place = place_of(str(tmp_path / "place"))
    assert read(InputsRef(f"{place}a.json", DIGEST), (place,), 1_000) == CONTENT


def test_a_store_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"class": "no_such_package.Files", "err": "Install no-such-package to use it"}
    monkeypatch.setitem(known_implementations, "lost", known)
    found = refusal("lost://in/a", "lost://in/")
    assert found.code == "reference_unavailable"
    assert "Install no-such-package" in found.message
    assert "fsspec knows no other://" in refusal("other://in/a", "other://in/").message


def test_a_file_that_may_not_be_opened_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.json").write_bytes(CONTENT)
    monkeypatch.setattr(os, "open", broken)
    place = place_of(str(tmp_path))
    found = refusal(f"{place}a.json", place)
    assert (found.code, "PermissionError" in found.message) == ("reference_unavailable", True)


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_what_is_put_is_named_by_its_digest_and_written_once(tmp_path: Path, kind: str) -> None:
    store = str(tmp_path / "new" / "store") if kind == "file" else "memory://store"
    ref = put(store, CONTENT)
    assert ref == InputsRef(f"{place_of(store)}{DIGEST}.json", DIGEST, len(CONTENT))
    files, path = fsspec.core.url_to_fs(ref.url)
    written = files.modified(path)
    assert put(store, CONTENT) == ref
    assert files.modified(path) == written
    assert [one.rpartition("/")[2] for one in files.ls(path.rpartition("/")[0], detail=False)] == [f"{DIGEST}.json"]
    assert read(ref, (place_of(store),), 1_000) == CONTENT
    assert describe(ref.url, 1_000) == ref


def test_a_half_written_object_is_written_again(tmp_path: Path) -> None:
    (tmp_path / f"{DIGEST}.json").write_bytes(CONTENT[:3])
    put(str(tmp_path), CONTENT)
    assert (tmp_path / f"{DIGEST}.json").read_bytes() == CONTENT


def test_what_cannot_be_put_or_described(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    with pytest.raises(StoreUnavailable, match="file"):
        put(str(tmp_path / "file" / "below"), CONTENT)
    with pytest.raises(ConfigError, match="does not exist"):
        describe(str(tmp_path / "nothing"), 1_000)
    with pytest.raises(ConfigError, match="reference_bytes_max"):
        describe(str(tmp_path / "file"), 7)
