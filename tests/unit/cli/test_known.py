"""A name that nobody knows is an error with the nearest, not an empty answer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from schemas.codec import encode_decision
from sie_stream.cli import decisions, failures, main, stream
from sie_stream.cli.known import names_in
from sie_stream.decisions import Decision, Move
from sie_stream.errors import ConfigError
from sie_stream.records import LogWrite
from sie_stream.settings import Settings
from sie_stream.sim.log import SimLog
from topics.catalog import system_topics

NOW_MS = 1_760_000_000_000
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command over the log in memory: wine-rf is declared, churn was moved to worker-0 once."""
    log, settings = SimLog(session_timeout_ms=10_000), Settings()
    log.admin().ensure(system_topics(settings))
    moved = Decision(
        "d-1-0", "replica_placed", "churn", "-", 1, NOW_MS, {}, moves=(Move("churn", "replica", "", "worker-0/cpu:0"),)
    )
    names = settings.topics
    log.plain_writer().write(
        [LogWrite(names.decisions, encode_decision(moved)), LogWrite(names.models, b"{}", b"wine-rf")]
    )
    connection = SimpleNamespace(settings=settings, reader=lambda: log.reader("tools"))
    nobody = SimpleNamespace(results=lambda *_ids, **_options: iter(()))
    monkeypatch.setattr(stream, "Client", lambda **_options: nullcontext(nobody))
    for module in (decisions, failures, stream):
        monkeypatch.setattr(module, "Connection", SimpleNamespace(open=lambda _servers: connection))
    return lambda *arguments: CliRunner().invoke(main.app, arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("decisions", "--model", "wine-rg"),
            "--model 'wine-rg': nothing of that name is known here. Did you mean 'wine-rf'",
        ),
        (("decisions", "--model", "chrun", "-o", "json"), "Did you mean 'churn'"),
        (
            ("results", "--model", "wine-rg"),
            "--model 'wine-rg': nothing of that name is known here. Did you mean 'wine-rf'",
        ),
        (
            ("failures", "--of", "worker-9"),
            "--of 'worker-9': nothing of that name is known here. Did you mean 'worker-0'",
        ),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(run: Run, arguments: tuple[str, ...], said: str) -> None:
    shown = run(*arguments)
    assert isinstance(shown.exception, ConfigError)
    assert said in str(shown.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("decisions", "--model", "wine-rf"), "no decisions"),
        (("results", "--model", "wine-rf"), "no results"),
        (("failures", "--of", "worker-0"), "no failures"),
        (("failures", "--of", "worker-0/cpu:0"), "no failures"),
    ],
)
def test_a_known_name_may_have_nothing(run: Run, arguments: tuple[str, ...], said: str) -> None:
    shown = run(*arguments)
    assert shown.exit_code == 0, shown.exception
    assert said in shown.output


def test_requests_that_were_refused_without_a_model_make_no_name_known() -> None:
    models: set[str] = set()
    found = [SimpleNamespace(model="m"), SimpleNamespace(model="")]
    assert list(stream.seen(found, models)) == found  # type: ignore[arg-type]
    assert models == {"m"}


def test_an_unknown_status_is_told_with_those_that_exist(run: Run) -> None:
    shown = run("results", "--status", "faild")
    assert shown.exit_code == 2
    assert "allowed ok, rejected, expired, shed, failed." in " ".join(shown.output.split())
    assert "Did you mean 'failed'?" in shown.output


def test_ids_of_undone_decisions_are_no_names() -> None:
    """Sorted before every model, they would be all that is told of what is known."""
    refused = Decision("d-3-0", "undo_refused", "d-1-0", "-", 3, NOW_MS, {}, undoes="d-1-0")
    assert names_in([refused]) == set()
