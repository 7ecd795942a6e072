"""Manifest, hidden personal data, keys."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from sie_stream.auditing.bundle import FORMAT, FileEntry, Manifest, differences, manifest_bytes, read_manifest
from sie_stream.auditing.pii import PREFIX, hidden, keyed
from sie_stream.edge.signing import (
    fingerprint,
    load_private,
    load_public,
    make_key,
    make_secret,
    public_pem,
    read_secret,
    signed_by,
)
from sie_stream.errors import ConfigError

MANIFEST = Manifest(
    format=FORMAT,
    made_at_ms=1,
    release="0.1",
    cluster_id="c",
    topic_prefix="sie.",
    from_ms=0,
    to_ms=2,
    spans={"sie.requests/0": (0, 5)},
    models=("m@1",),
    pii={"m": ("inputs.name",)},
    pii_key_kept=False,
    left_out={},
    signer="sha256:x",
    files={"a.parquet": FileEntry("11", 5, 2), "b.json": FileEntry("22", 6)},
)


def test_a_manifest_comes_back_and_is_always_the_same_bytes() -> None:
    text = manifest_bytes(MANIFEST)
    assert read_manifest(text) == MANIFEST
    assert manifest_bytes(read_manifest(text)) == text
    for bad, said in ((b"{", "manifest.json"), (text.replace(b'"format": 1', b'"format": 9'), "this release reads 1")):
        with pytest.raises(ConfigError, match=said):
            read_manifest(bad)


def test_every_difference_is_named() -> None:
    assert differences(MANIFEST, MANIFEST.files) == ()
    found = {"a.parquet": FileEntry("12", 5), "c.txt": FileEntry("1", 1)}
    assert differences(MANIFEST, found) == (
        "a.parquet: changed (SHA-256 12, signed was 11)",
        "b.json: missing",
        "c.txt: not in the manifest",
    )
    longer = {"a.parquet": FileEntry("11", 6), "b.json": FileEntry("22", 6)}
    assert differences(MANIFEST, longer) == ("a.parquet: 6 bytes, signed were 5",)


def test_marked_fields_are_hashed_wherever_they_are() -> None:
    row = {"name": "Ada", "age": 36, "kin": [{"name": "Bo", "x": None}], "a.b": "c", "note": None}
    text = hidden(json.dumps(row).encode(), ("name", "kin[].name", "a.b", "note"), b"k")
    assert text is not None
    found = json.loads(text)
    assert found["name"] == keyed("Ada", b"k")
    assert found["name"].startswith(PREFIX)
    assert found["kin"] == [{"name": keyed("Bo", b"k"), "x": None}]
    assert found["a.b"] == keyed("c", b"k")
    assert (found["age"], found["note"]) == (36, None)
    assert b"Ada" not in text


def test_hashes_depend_on_key_value_and_type() -> None:
    assert keyed("36", b"k") != keyed(36, b"k")
    assert keyed("a", b"k") != keyed("a", b"l")
    assert keyed({"a": 1, "b": 2}, b"k") == keyed({"b": 2, "a": 1}, b"k")
    assert hidden(b"{", ("a",), b"k") is None
    assert hidden(b'{"a":1}', (), b"k") == b'{"a":1}'


def test_keys_are_made_once_and_sign(tmp_path: Path) -> None:
    path = tmp_path / "audit.key"
    name = make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    key = load_private(path)
    pem = public_pem(key.public_key())
    assert fingerprint(pem) == name
    assert path.with_name("audit.key.pub").read_bytes() == pem
    signature = key.sign(b"text")
    assert signed_by(load_public(pem, "x"), signature, b"text")
    assert not signed_by(load_public(pem, "x"), signature, b"tex")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="never written over"):
        make_key(path)
    path.unlink()
    with pytest.raises(ConfigError, match="never written over"):
        make_key(path)
    assert not path.exists()
    path.write_bytes(before)


def test_bad_keys_are_refused_with_what_to_do(tmp_path: Path) -> None:
    secret = tmp_path / "pii.key"
    make_secret(secret)
    assert len(read_secret(secret)) == 32
    with pytest.raises(ConfigError, match="never written over"):
        make_secret(secret)
    for load in (load_private, read_secret):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(tmp_path / "none")
    (tmp_path / "bad").write_text("zz")
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        read_secret(tmp_path / "bad")
    (tmp_path / "short").write_text("00")
    with pytest.raises(ConfigError, match="keygen --pii"):
        read_secret(tmp_path / "short")
    with pytest.raises(ConfigError, match="audit keygen"):
        load_private(secret)
    with pytest.raises(ConfigError, match="no public key"):
        load_public(b"x", "here.pub")


def test_file_entries_are_small_in_json() -> None:
    assert msgspec.json.decode(manifest_bytes(MANIFEST))["files"]["a.parquet"] == {"sha256": "11", "size": 5, "rows": 2}
