"""Which places may be read, and what is said of references that cannot be."""

from __future__ import annotations

from hashlib import sha256

import pytest

from sie_stream.errors import ConfigError, InvalidRequest
from sie_stream.records import InputsRef
from sie_stream.references import check_content, check_reference, how_to_refer, parse_prefixes
from sie_stream.settings import Settings, settings_from

CONTENT = b'{"x": 1}'
DIGEST = sha256(CONTENT).hexdigest()
PLACES = ("s3://bucket/in/", "file:///data/in/")


def refused(url: str, digest: str = DIGEST, size: int | None = None) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_reference(InputsRef(url, digest, size), PLACES, 1_000)
    return caught.value


def test_places_are_folders() -> None:
    text = " s3://bucket/in, /data/in/ ,file:///data/in,"
    assert parse_prefixes(text) == ("s3://bucket/in/", "file:///data/in/", "file:///data/in/")
    assert Settings().reference_places == ()


@pytest.mark.parametrize(
    "text",
    [
        "/",
        "file:///",
        "data/in",
        "s3://",
        "/data/../etc",
        "s3://b/%2e%2e/",
        "zip://a::file:///b",
        "/a//b",
        "ftp://u@h/a",
    ],
)
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(ConfigError, match="A place is a folder"):
        settings_from({"reference_prefixes": text})


@pytest.mark.parametrize(
    "url", ["s3://bucket/in/a.json", "s3://bucket/in/2026/a b.json".replace(" ", "_"), "file:///data/in/a"]
)
def test_what_is_below_a_place_is_allowed(url: str) -> None:
    check_reference(InputsRef(url, DIGEST, 1_000), PLACES, 1_000)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/inner/a",
        "s3://bucket2/in/a",
        "s3://bucket/a",
        "file:///data/input",
        "file:///etc/passwd",
        "http://10.0.0.1/a",
    ],
)
def test_what_is_elsewhere_is_not(url: str) -> None:
    refusal = refused(url)
    assert refusal.code == "reference_not_allowed"
    assert "s3://bucket/in/, file:///data/in/" in refusal.message


def test_without_places_nothing_is_allowed() -> None:
    with pytest.raises(InvalidRequest, match="no place is allowed") as caught:
        check_reference(InputsRef("file:///etc/passwd", DIGEST), (), 1_000)
    assert caught.value.code == "reference_not_allowed"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/in/../secret",
        "s3://bucket/in/./a",
        "s3://bucket/in//a",
        "s3://bucket/in/",
        "s3://bucket/in/%2E%2e/secret",
        "s3://bucket/in/..%2fsecret",
        "s3://bucket/in/%252e%252e/secret",
        "s3://bucket/in/a?versionId=1",
        "s3://bucket/in/a#b",
        "s3://bucket/in/a\\..\\b",
        "s3://bucket/in/a\nb",
        "s3://bucket/in/..;/secret",
        "s3://bucket/in/.;x=1/secret",
        "s3://bucket/in/..%3B/secret",
        "s3://bucket/in/%c0%ae%C0%AE/secret",
        "s3://bucket/in/a\x9b31m",
        "s3://bucket/in/a\u202eb",
        "s3://bucket/in/a::file:///etc/passwd",
        "simplecache::s3://bucket/in/a",
        "S3://bucket/in/a",
        "file://host/data/in/a",
        "/data/in/a",
        "",
        "s3://bucket/in/" + "a" * 1_100,
    ],
)
def test_urls_that_could_lead_out_are_refused(url: str) -> None:
    refusal = refused(url)
    assert (refusal.code, refusal.field) == ("bad_reference", "inputs_ref.url")
    assert len(refusal.message) < 2_500


@pytest.mark.parametrize("digest", ["", "abc", DIGEST.upper(), DIGEST + "0", "g" * 64])
def test_digests_are_64_digits(digest: str) -> None:
    assert refused("s3://bucket/in/a", digest).field == "inputs_ref.sha256"


def test_a_declared_size_is_believed_when_it_is_too_much() -> None:
    assert refused("s3://bucket/in/a", size=1_001).code == "reference_too_large"
    assert refused("s3://bucket/in/a", size=-1).code == "bad_reference"


@pytest.mark.parametrize(
    ("ref", "content", "code"),
    [
        (InputsRef("u", DIGEST), CONTENT + b" ", "reference_mismatch"),
        (InputsRef("u", DIGEST, 7), CONTENT, "reference_mismatch"),
        (InputsRef("u", DIGEST), b"x" * 1_001, "reference_too_large"),
    ],
)
def test_other_bytes_are_refused(ref: InputsRef, content: bytes, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_content(ref, content, 1_000)
    assert caught.value.code == code
    check_content(InputsRef("u", DIGEST, len(CONTENT)), CONTENT, 1_000)


def test_too_large_inputs_are_told_where_to_go() -> None:
    assert "s3://bucket/in/ or file:///data/in/" in how_to_refer(PLACES)
    assert "reference_prefixes" in how_to_refer(())
