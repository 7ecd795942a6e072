"""`sie-stream results`: the newest ones, in the order in which they ended; and what `produce` says of ids."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs
from typer.testing import CliRunner

from sie_stream.cli import main, stream
from sie_stream.cli.stream import CHUNK, IDS_SHOWN, PartlySent, look_later, newest
from sie_stream.client.requests import InferenceResult, Request, from_record
from sie_stream.client.sync_client import Submission
from sie_stream.errors import ConfigError, FatalLogError
from sie_stream.records import Provenance, Result, Timings, Usage


def result(name: str, finished_at: int) -> InferenceResult:
    origin = Provenance("sie.requests", 0, 0)
    return from_record(
        Result(name, "ok", "mi-1", "m", "1", "stable", b"{}", None, Usage(), Timings(), origin, finished_at)
    )


def test_the_newest_come_last_whatever_the_order_of_partitions() -> None:
    found = [result("a", 10), result("b", 40), result("c", 20), result("d", 20), result("e", 5)]
    assert [one.request_id for one in newest(found, 3)] == ["c", "d", "b"]
    assert [one.request_id for one in newest(found, 100)] == ["e", "a", "c", "d", "b"]
    assert newest([], 3) == []


class Sent(Submission):
    """Somebody presses Ctrl-C while its answer is waited for."""

    def result(self, timeout_s: float | None = None) -> InferenceResult:
        if self.future.done():
            return self.future.result()
        raise KeyboardInterrupt


@pytest.fixture
def two_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends two requests; the first is answered at once."""
    answered: Future[InferenceResult] = Future()
    answered.set_result(result("a", 10))
    client = SimpleNamespace(submit_many=lambda _requests: [Sent("a", answered), Sent("b", Future())])
    monkeypatch.setattr(stream, "Client", lambda _servers, **_options: nullcontext(client))


PRODUCE = ["produce", "-m", "m", "-i", json.dumps({"x": 1})]


@pytest.mark.usefixtures("two_sent")
def test_ctrl_c_while_answers_are_waited_for_says_which_are_missing() -> None:
    shown = CliRunner().invoke(main.app, [*PRODUCE, "--wait"])
    assert shown.exit_code == 130
    assert "interrupted: 1 of 2 requests are answered" in shown.output
    assert "results --request-id b" in shown.output
    assert "results --request-id a" not in shown.output


@pytest.mark.parametrize("form", ["table", "json"])
def test_requests_that_were_shed_or_refused_end_produce_with_1_and_are_counted(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Submission] = []
    for name, status in (("a", "ok"), ("b", "shed"), ("c", "rejected"), ("d", "shed")):
        future: Future[InferenceResult] = Future()
        future.set_result(structs.replace(result(name, 10), status=status))
        ended.append(Sent(name, future))
    client = SimpleNamespace(submit_many=lambda _requests: ended)
    monkeypatch.setattr(stream, "Client", lambda _servers, **_options: nullcontext(client))
    shown = CliRunner().invoke(main.app, [*PRODUCE, "--wait", "-o", form])
    assert shown.exit_code == 1
    assert shown.stderr.splitlines()[-1] == "3 of 4 requests ended without an answer: 1 rejected, 2 shed"


def taken(requests: Iterable[Request]) -> list[Submission]:
    """A client whose Kafka takes everything, but for a row that asks for trouble."""
    asked = list(requests)
    if any("trouble" in request.inputs for request in asked):
        raise FatalLogError("Kafka did not take it")
    return [Sent(str(request.inputs["x"]), Future()) for request in asked]


@pytest.mark.parametrize("wait", [[], ["--wait"]])
def test_a_bad_row_in_a_later_chunk_says_how_many_were_sent(
    wait: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "Client", lambda _servers, **_options: nullcontext(SimpleNamespace(submit_many=taken)))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"x": {number}}}\n' for number in range(CHUNK + 7)) + "no row\n")
    shown = CliRunner().invoke(main.app, ["produce", "-m", "m", "-f", str(rows), *wait])
    assert isinstance(shown.exception, PartlySent)
    said = str(shown.exception)
    assert f"line {CHUNK + 8}: not JSON" in said
    assert f"The first {CHUNK} rows were sent before that" in said
    assert f"sie-stream results --request-id {CHUNK - 1}" in said
    assert "none after them was" in said
    shown = CliRunner().invoke(main.app, ["produce", "-m", "m", "-f", str(rows), *wait, "-o", "json"])
    told = json.loads(shown.stdout)
    assert (told["sent"], told["request_ids"][-1], told["error"]["code"]) == (CHUNK, str(CHUNK - 1), ConfigError.code)
    rows.write_text('{"x": 1}\n[1]\n')
    shown = CliRunner().invoke(main.app, ["produce", "-m", "m", "-f", str(rows), *wait])
    assert str(shown.exception).endswith("No row was sent")


def test_a_chunk_that_kafka_did_not_take_may_have_arrived_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "Client", lambda _servers, **_options: nullcontext(SimpleNamespace(submit_many=taken)))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"x": {number}}}\n' for number in range(CHUNK)) + '{"x": 1, "trouble": 1}\n')
    shown = CliRunner().invoke(main.app, ["produce", "-m", "m", "-f", str(rows)])
    assert f"The first {CHUNK} rows were sent" in str(shown.exception)
    assert "some of the next may have been" in str(shown.exception)


@pytest.mark.usefixtures("two_sent")
def test_every_id_is_told_of_what_was_sent() -> None:
    shown = CliRunner().invoke(main.app, PRODUCE)
    assert "sent 2 requests" in shown.stdout
    for request_id in ("a", "b"):
        assert f"sie-stream results --request-id {request_id}" in shown.stdout
    many = list(look_later([str(number) for number in range(IDS_SHOWN + 5)]))
    assert (len(many), many[-1]) == (IDS_SHOWN + 1, "... and 5 more; `produce -o json` tells every id")
