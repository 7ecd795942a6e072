"""Which declaration answers."""

from __future__ import annotations

import msgspec
import pytest

from sie_stream.control import ModelLaunch, RouteRow
from sie_stream.errors import ConfigError
from sie_stream.replay.versions import Declared, Unavailable, VersionBook, model_and_version

ROUTE = RouteRow("mi-1", "m", 0, "sie.work.m", 3, 1, (), "scoring", 1, msgspec.Raw(b"{}"), "", "", 0)


def declared(offset: int, version: str, digest: str, source: str = "folder", **config: str) -> Declared:
    launch = ModelLaunch("m", version, "mi-1", "sklearn", source, digest, {**config}, "scoring", 1, 0, 64)
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


ADAPTERS = VersionBook(
    [
        declared(1, "1", "sha256:a", base="/chat-1", base_digest="sha256:1"),
        declared(1, "1", "sha256:a", base="/chat-2", base_digest="sha256:2"),
        declared(2, "2", "", base="/chat-1"),
        declared(3, "3", "sha256:a"),
    ]
)


@pytest.mark.parametrize(
    ("version", "digest", "base", "demanded"),
    [
        ("1", "sha256:a over sha256:1", "/chat-1", "sha256:1"),
        ("1", "sha256:a over sha256:2", "/chat-2", "sha256:2"),
        ("1", "sha256:a", "/chat-2", "sha256:2"),
        ("2", "sha256:a over sha256:7", "/chat-1", "sha256:7"),
    ],
)
def test_the_base_of_an_adapter_is_the_one_that_answered_and_no_other(
    version: str, digest: str, base: str, demanded: str
) -> None:
    """A result from before bases were named fits the likeliest, which is the last."""
    found = ADAPTERS.as_it_was("m", version, digest, 10**6)
    assert isinstance(found, Declared)
    assert found.launch.weights_digest == "sha256:a"
    assert found.launch.config == {"base": base, "base_digest": demanded}


@pytest.mark.parametrize("version", ["1", "3"])
def test_a_base_that_no_declaration_names_is_refused(version: str) -> None:
    found = ADAPTERS.as_it_was("m", version, "sha256:a over sha256:7", 10**6)
    assert isinstance(found, Unavailable)
    assert "answered with weights sha256:a over sha256:7, but every declaration" in found.reason
    assert ("names sha256:a over sha256:2" in found.reason) is (version == "1")


def test_names_with_and_without_version() -> None:
    assert model_and_version("m@1.0.0") == ("m", "1.0.0")
    assert model_and_version("m") == ("m", "")
