"""The examples say how they are called; none answers a wrong call with a traceback."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["sdk.py", "plain_producer.py", "plain_consumer.py"])
def test_without_arguments_usage_is_shown(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert left.value.code == 2
    assert f"usage: {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "arguments"), [("sdk.py", ["nosuch"]), ("plain_producer.py", ["127.0.0.1:1", "nosuch"])]
)
def test_an_unknown_model_is_told_with_those_that_are_there(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "model 'nosuch' has no" in said
    assert "allowed: " in said
