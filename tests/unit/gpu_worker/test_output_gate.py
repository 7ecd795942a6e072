"""How much of an engine's output goes to the log."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.output_gate import BYTES_PER_S, LAST_LINES, LINE_BYTES, LINES_PER_S, OutputGate
from tests.examples import examples


def numbered(count: int, start: int = 0) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(start, start + count))


def test_what_is_usual_is_passed_on_as_it_is() -> None:
    gate = OutputGate("engine e", 0.0)
    assert gate.read(b"one\nand ha", 1.0) == b"one\n"
    assert gate.read(b"lf\n", 2.0) == b"and half\n"
    assert gate.read(b"no end", 3.0) == b""
    assert gate.ended() == b"no end\n"


def test_lines_beyond_what_a_second_allows_are_counted() -> None:
    gate = OutputGate("engine e", 0.0)
    assert gate.read(numbered(LINES_PER_S + 7), 10.0) == numbered(LINES_PER_S)
    assert gate.read(numbered(3), 20.0) == b""
    assert gate.owes
    assert gate.read(b"again\n", 1_000.0) == b"engine e: 10 lines left out\nagain\n"
    assert not gate.owes


def test_what_was_left_out_is_told_though_nothing_more_comes() -> None:
    gate = OutputGate("engine e", 0.0)
    gate.read(numbered(LINES_PER_S + 1), 0.0)
    assert gate.read(b"", 999.0) == b""
    assert gate.read(b"", 1_000.0) == b"engine e: 1 lines left out\n"


def test_bytes_are_bounded_as_well() -> None:
    gate = OutputGate("engine e", 0.0)
    line = b"x" * 1_999 + b"\n"
    written = gate.read(line * 1_000, 0.0)
    assert BYTES_PER_S <= len(written) < BYTES_PER_S + len(line)


def test_a_line_without_end_is_shortened_and_takes_no_memory() -> None:
    gate = OutputGate("engine e", 0.0)
    for _ in range(500):
        assert gate.read(b"y" * 65_536, 0.0) == b""
    assert gate.read(b"\nnext\n", 0.0) == b"y" * LINE_BYTES + b" ...\nnext\n"


def test_the_last_lines_are_kept_whatever_was_left_out() -> None:
    gate = OutputGate("engine e", 0.0)
    for start in range(0, 100_000, 1_000):
        gate.read(numbered(1_000, start), 0.0)
    gate.read(b"MemoryError: that is why", 0.0)
    end = gate.ended()
    assert b"engine e: 99800 lines left out\n" in end
    assert end.endswith(b"  line 99999\n  MemoryError: that is why\n")
    assert len(gate.last_lines) == LAST_LINES


@given(st.lists(st.tuples(st.binary(max_size=400).map(lambda one: one.replace(b"\0", b"\n")), st.integers(0, 400))))
@examples(200)
def test_however_output_is_cut_into_reads_no_line_is_lost_or_told_twice(reads: list[tuple[bytes, int]]) -> None:
    gate, now_ms, written, said = OutputGate("engine e", 0.0), 0.0, b"", b"".join(data for data, _ in reads)
    for data, pause in reads:
        now_ms += pause
        written += gate.read(data, now_ms)
    written += gate.ended().partition(b"engine e ended;")[0]
    told = [line for line in written.split(b"\n") if line.startswith(b"engine e: ")]
    left_out = sum(int(line.split()[2]) for line in told)
    lines = said.count(b"\n") + (not said.endswith(b"\n") and said != b"")
    assert written.count(b"\n") - len(told) + left_out == lines
