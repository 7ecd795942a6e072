"""A wrong address of Kafka: one line that says what to check, and nothing from the client itself."""

from __future__ import annotations

import json
import logging
import socket

import pytest
from typer.testing import CliRunner

from sie_stream.cli.main import FirstOnly, app
from sie_stream.edge.connection import Connection
from sie_stream.edge.kafka_reach import NoBroker, addresses, refuse_unreachable
from sie_stream.errors import ConfigError


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address where nothing listens, and no patience."""
    monkeypatch.setattr(refuse_unreachable, "__defaults__", (0.0,))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("command", [["get", "models"], ["results"], ["keys", "list", "--ring", "none"], ["top"]])
def test_commands_say_that_no_broker_answers_and_what_to_check(
    command: list[str], closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sie_stream.cli.keys.Keyring", lambda _folder: None)
    shown = CliRunner().invoke(app, [*command, "-b", closed])
    assert isinstance(shown.exception, NoBroker)
    assert f"no Kafka broker answers at {closed}. Is the address right" in str(shown.exception)
    assert "\n" not in str(shown.exception)


def test_doctor_goes_on_and_ends_with_1(closed: str) -> None:
    shown = CliRunner().invoke(app, ["doctor", "-b", closed, "-o", "json"])
    broker = next(one for one in json.loads(shown.stdout) if one["check"] == "broker")
    assert (broker["state"], broker["found"], shown.exit_code) == ("wrong", "no answer", 1)


def test_one_that_listens_is_enough(closed: str) -> None:
    with socket.socket() as broker:
        broker.bind(("127.0.0.1", 0))
        broker.listen()
        there = f"127.0.0.1:{broker.getsockname()[1]}"
        assert Connection.open(f"{closed},{there}").settings.bootstrap_servers == f"{closed},{there}"
        assert Connection.open(there).settings.bootstrap_servers == there
    with pytest.raises(NoBroker):
        refuse_unreachable(f"{closed},{there}")


def test_addresses_are_read_as_the_client_reads_them() -> None:
    assert addresses("kafka-1, SSL://b:1,[::1]:9093,SASL_SSL://[fe80::2]") == [
        ("kafka-1", 9092),
        ("b", 1),
        ("::1", 9093),
        ("fe80::2", 9092),
    ]
    with pytest.raises(ConfigError, match="'kafka:port' is no address: allowed is HOST:PORT"):
        addresses("kafka:port")


def test_the_client_speaks_once_whatever_it_repeats() -> None:
    errors = [logging.LogRecord("k", level, "", 0, "FAIL", (), None) for level in (30, 40, 40, 40)]
    only = FirstOnly()
    assert [only.filter(one) for one in errors] == [True, True, False, False]
