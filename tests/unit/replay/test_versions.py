"""Which declaration answers."""

from __future__ import annotations

import msgspec
import pytest

from sie_stream.control import ModelLaunch, RouteRow
from sie_stream.errors import ConfigError
from sie_stream.replay.versions import Declared, Unavailable, VersionBook, model_and_version

ROUTE = RouteRow("mi-1", "m", 0, "sie.work.m", 3, 1, (), "scoring", 1, msgspec.Raw(b"{}"), "", "", 0)


def declared(offset: int, version: str, digest: str, source: str = "folder") -> Declared:
    launch = ModelLaunch("m", version, "mi-1", "sklearn", source, digest, {}, "scoring", 1, 0, 64)
    return Declared(offset, offset * 100, launch, ROUTE)


BOOK = VersionBook(
    [declared(1, "1", "sha256:a"), declared(2, "2", ""), declared(3, "1", "sha256:a", "moved"), declared(4, "3", "x")]
)


def test_a_pinned_version_is_the_newest_declaration_of_it() -> None:
    assert BOOK.pinned("m", "1").launch.source == "moved"
    assert BOOK.pinned("m", "").launch.version == "3"


def test_a_version_or_model_that_was_never_declared_is_named_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="Declared: 1, 2, 3"):
        BOOK.pinned("m", "9")
    with pytest.raises(ConfigError, match="no declaration"):
        BOOK.pinned("n", "")


def test_as_it_was_is_what_was_in_force_then_with_the_weights_that_answered() -> None:
    then = BOOK.as_it_was("m", "1", "sha256:a", 250)
    later = BOOK.as_it_was("m", "1", "sha256:a", 10**6)
    undigested = BOOK.as_it_was("m", "2", "sha256:b", 10**6)
    assert isinstance(then, Declared)
    assert isinstance(later, Declared)
    assert isinstance(undigested, Declared)
    assert (then.launch.source, later.launch.source) == ("folder", "moved")
    assert undigested.launch.weights_digest == "sha256:b"


def test_weights_that_no_declaration_names_and_lost_declarations_are_refused() -> None:
    other = BOOK.as_it_was("m", "1", "sha256:z", 250)
    lost = BOOK.as_it_was("m", "7", "sha256:a", 250)
    assert isinstance(other, Unavailable)
    assert "sha256:z" in other.reason
    assert isinstance(lost, Unavailable)
    assert "not on the control log" in lost.reason


def test_names_with_and_without_version() -> None:
    assert model_and_version("m@1.0.0") == ("m", "1.0.0")
    assert model_and_version("m") == ("m", "")
