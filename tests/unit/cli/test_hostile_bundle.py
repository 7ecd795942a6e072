"""`audit check` of a folder that somebody else filled: it ends, and nothing strange in it counts as intact."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from sie_stream.auditing.bundle import FORMAT, Manifest, manifest_bytes, read_manifest
from sie_stream.cli.audit_bundle import _entries, _seal, problems_of
from sie_stream.cli.main import app
from sie_stream.edge.signing import load_private, make_key
from sie_stream.errors import ConfigError

EMPTY = Manifest(
    format=FORMAT,
    made_at_ms=0,
    release="r",
    cluster_id="c",
    topic_prefix="sie.",
    from_ms=0,
    to_ms=1,
    spans={},
    models=(),
    pii={},
    pii_key_kept=False,
    left_out={},
    signer="",
    files={},
)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Signed, with one file in a folder."""
    made = tmp_path / "bundle"
    (made / "models").mkdir(parents=True)
    (made / "models" / "churn.json").write_text("{}")
    make_key(tmp_path / "key")
    entries = dict(_entries(made, {}))
    manifest = structs.replace(EMPTY, files=entries)
    _seal(made, manifest, load_private(tmp_path / "key"))
    assert problems_of(made, None)[0] == []
    return made


@pytest.mark.parametrize(("proven", "said"), [(True, ""), (False, "NOT PROVEN"), (None, "")])
def test_what_is_intact_says_whether_it_was_proven(tmp_path: Path, proven: bool | None, said: str) -> None:
    """An untouched bundle may hold evidence of requests that were lost."""
    made = tmp_path / "bundle"
    made.mkdir()
    if proven is not None:
        (made / "verify.json").write_text(json.dumps({"proven": proven, "requests": 1}))
    make_key(tmp_path / "key")
    _seal(made, structs.replace(EMPTY, files=dict(_entries(made, {}))), load_private(tmp_path / "key"))
    shown = CliRunner().invoke(app, ["audit", "check", str(made)])
    assert shown.exit_code == 0
    assert "intact: " in shown.output
    assert ("NOT PROVEN" in shown.output) == bool(said)
    as_json = CliRunner().invoke(app, ["audit", "check", str(made), "-o", "json"])
    assert json.loads(as_json.output)["proven"] is proven


def test_links_and_pipes_are_no_part_of_a_bundle(bundle: Path) -> None:
    outside = bundle.parent / "outside"
    outside.mkdir()
    (outside / "churn.json").write_text("{}")
    ways = {
        "extra": lambda path: path.symlink_to(outside),
        "models/more.json": lambda path: path.symlink_to(outside / "churn.json"),
        "broken": lambda path: path.symlink_to(outside / "nothing"),
        "endless": lambda path: path.symlink_to("/dev/zero"),
        "pipe": os.mkfifo,
    }
    for name, make in ways.items():
        make(bundle / name)
        problems, manifest = problems_of(bundle, None)
        assert [problem.partition(":")[0] for problem in problems] == [name]
        assert manifest is None, "nothing in it was believed"
        (bundle / name).unlink()
    (bundle / "models" / "churn.json").unlink()
    (bundle / "models" / "churn.json").symlink_to(outside / "churn.json")
    assert problems_of(bundle, None)[0] == ["models/churn.json: a link, as no bundle has"]


def test_a_manifest_that_is_none_is_an_error_that_says_so() -> None:
    for text in (b"[" * 100_000, b"{", b"\xff", b"null"):
        with pytest.raises(ConfigError):
            read_manifest(text)
    assert read_manifest(manifest_bytes(EMPTY)) == EMPTY
