"""`sie-stream simulate`: what it lists, what it refuses, and one short life of a small fleet as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sie_stream.cli.main import app
from sie_stream.errors import ConfigError

TINY = """
title = "tiny"
hours = 0.02

[fleet]
servers = 1
gpus = 2

[models]
count = 2
replicas = 2

[traffic]
requests_per_s = 20
"""


def test_it_lists_what_is_shipped() -> None:
    listed = CliRunner().invoke(app, ["simulate", "--list", "-o", "json"])
    assert listed.exit_code == 0
    assert {"a100-32x8", "double-peak"} <= {row["scenario"] for row in json.loads(listed.stdout)}


def test_a_short_life_as_json(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    ran = CliRunner().invoke(app, ["simulate", str(path), "--baseline", "static", "-o", "json"])
    assert ran.exit_code == 0, ran.output
    ours, static = json.loads(ran.stdout)
    assert (ours["policy"], static["policy"]) == ("sie-stream", "static")
    assert ours["requests"] == static["requests"] > 0
    assert ours["lost"] == static["lost"] == 0
    assert len(ours["digest"]) == 16


def test_the_table_has_every_tag_and_says_how_they_count(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    ran = CliRunner().invoke(app, ["simulate", str(path)])
    assert ran.exit_code == 0, ran.output
    assert "UNTAGGED %" in ran.stdout
    assert "a model with two counts for both" in ran.stdout
    assert "waiting: requests not answered" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["double-peek"], "Did you mean 'double-peak'"),
        ([__file__], "is a file, but no TOML file"),
        (["double-peak", "--data", "nowhere"], "there is no such folder"),
    ],
)
def test_what_it_refuses_says_what_to_do(arguments: list[str], said: str) -> None:
    refused = CliRunner().invoke(app, ["simulate", *arguments])
    assert isinstance(refused.exception, ConfigError)
    assert said in str(refused.exception)


@pytest.mark.parametrize(
    "arguments",
    [[], ["double-peak", "--hours", "0"], ["double-peak", "--baseline", "statik"], ["double-peak", "--seed", "-1"]],
)
def test_wrong_options_are_usage_errors(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["simulate", *arguments]).exit_code == 2
