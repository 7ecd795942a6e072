"""What others wrote, as commands show it: nothing in it commands the terminal, and one bad record hides no other."""

from __future__ import annotations

import io

import pytest
from msgspec import Raw

from schemas.codec import encode_row
from sie_stream.cli.audit_contents import declared_rows
from sie_stream.cli.declared_outputs import declared_outputs
from sie_stream.cli.output import SafeConsole, one_line, printable, table_of
from sie_stream.cli.stream import _line
from sie_stream.client.requests import InferenceResult
from sie_stream.control import ModelRow
from sie_stream.ids import TopicNames
from sie_stream.ports import TopicSpec
from sie_stream.records import LogWrite, Provenance, ResultError, Timings, Usage
from sie_stream.sim.log import SimLog

HOSTILE = ("\x1b[2J\x1b]0;owned\x07", "\x9b31mred", "a\rb", "\u202eevil", "\x00\x08", "\x7f")
TOPIC = TopicNames("sie.").models


def commanding(text: str) -> list[str]:
    return [letter for letter in text if letter != "\n" and not letter.isprintable()]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_console_obeys_nothing_that_others_wrote(text: str) -> None:
    into = io.StringIO()
    console = SafeConsole(file=into, width=80, color_system=None)
    console.print(table_of([{"model": f"[/x][bold]{text}"}], ["model"]))
    console.print(f"plain {text}", markup=False)
    assert commanding(into.getvalue()) == []
    assert "[/x][bold]" in into.getvalue(), "brackets are text, too"


def test_its_own_colours_stay() -> None:
    into = io.StringIO()
    SafeConsole(file=into, force_terminal=True, color_system="standard").print("[bold]ready[/]")
    assert into.getvalue().startswith("\x1b[1m")


def test_text_without_commands_is_left_as_it_is() -> None:
    for text in ("ready", "Größe 5 µm", "a\tb\nc", "\u4e2d\u6587", ""):
        assert printable(text) == text
    assert one_line("a\nb") == "a\u240ab"


@pytest.mark.parametrize("text", [*HOSTILE, "x\nforged  ok  m@1  1 ms"])
def test_the_line_of_a_result_stays_one(text: str) -> None:
    error = ResultError("unknown_model", text, text)
    origin = Provenance("sie.requests", 0, 0)
    shown = _line(InferenceResult(text, "rejected", text, "", "", "", None, error, Usage(), Timings(), origin, 0))
    assert commanding(shown) == []
    assert shown.count("\n") == 1, "the head, and the error below"


def row(model: str, spec: bytes = b"{}") -> bytes:
    return encode_row(ModelRow(model, "1", 1, Raw(spec), "accepted", 0))


def test_a_record_that_is_no_row_is_told_and_hides_no_other() -> None:
    log = SimLog()
    log.admin().ensure([TopicSpec(TOPIC, 1, {})])
    writes = [(b"churn", row("churn")), (b"\xff\xfe", b"x"), (b"broken", b""), (b"../../evil", row("../../evil"))]
    writes += [(b"other", row("churn")), (b"listed", row("listed", b"[1]"))]
    log.plain_writer().write([LogWrite(TOPIC, value, key) for key, value in writes])
    told: list[str] = []
    assert list(declared_rows(log.reader("tools"), TOPIC, told.append)) == ["churn"]
    assert len(told) == 5
    assert declared_outputs(log.reader("tools"), TopicNames(), lambda: log.reader("more")).of("churn", "1") is not None
