"""What is given twice is taken twice or refused: never does the last one alone count."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sie_stream.cli.declare import specs_for
from sie_stream.cli.main import app
from sie_stream.edge.connection import Connection
from sie_stream.errors import ConfigError
from sie_stream.spec import SpecError

GOOD = "version: 1.0.0\nsource: m.skops\nmin_gpu_memory_mb: 1\n"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["replay", "--model", "a", "-m", "b"], "--model/-m"),
        (["produce", "-m", "a", "-f", "x", "-f", "y"], "--file/-f"),
        (["rollout", "pause", "a", "-v", "b", "-v", "c"], "--variant/-v"),
        (["audit", "export", "march", "--key", "a", "--key", "b"], "--key"),
        (["keys", "rotate", "--ring", "a", "--ring", "b"], "--ring"),
    ],
)
def test_an_option_that_takes_one_value_is_refused_when_given_twice(words: list[str], option: str) -> None:
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 2
    assert f"{option} is given 2 times, and takes one value." in shown.output


def test_repeatable_ones_and_switches_are_not() -> None:
    words = ["replay", "--partition", "0", "--partition", "1", "--harmful", "--harmful", "--speed", "x", "--late", "-"]
    shown = CliRunner().invoke(app, words)
    assert isinstance(shown.exception, ConfigError), "it went on to what is wrong with --late"


def test_apply_takes_several_files_and_tells_of_mistakes_in_all(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.yaml").write_text(f"model_id: {name}\n{GOOD}")
        (tmp_path / f"wrong-{name}.yaml").write_text(f"model_id: {name}\n{GOOD}priority_level: P7\n")
    connection = object.__new__(Connection)
    specs, _ = specs_for(lambda: connection, tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert [spec.name for spec, _ in specs] == ["a", "b"]
    with pytest.raises(SpecError) as caught:
        specs_for(lambda: connection, tmp_path / "wrong-a.yaml", tmp_path / "b.yaml", tmp_path / "wrong-b.yaml")
    assert [Path(problem.where).name for problem in caught.value.problems] == ["wrong-a.yaml", "wrong-b.yaml"]
