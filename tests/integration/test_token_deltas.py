"""Token deltas on real Kafka, with a real engine process that is killed in the middle of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from schemas.codec import decode_token_delta, encode_work
from sie_stream.edge.broker import EmbeddedBroker
from sie_stream.edge.tables import read_to_end
from sie_stream.records import LogWrite, TokenDelta
from tests.integration.test_worker_processes import PARTITION, Hand
from tests.unit.worker.rig import launch_of, work_item
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture
def hand(kafka: EmbeddedBroker) -> Iterator[Hand]:
    made = Hand(kafka.bootstrap_servers, "deltas.")
    made.launch = launch_of("m", backend="talker")
    yield made
    made.close()


def deltas(hand: Hand) -> list[TokenDelta]:
    return [decode_token_delta(record.value) for record in read_to_end(hand.reader, hand.names.tokens)]


def test_an_answer_begun_again_supersedes_its_deltas_and_the_result_is_written_once(hand: Hand, tmp_path: Path) -> None:
    worker = hand.start("w0", "w0-a")
    hand.serve("w0", "w0-a")
    gate = tmp_path / "gate"
    inputs = msgspec.json.encode({"words": 60, "pause_at": 20, "file": str(gate)})
    items = [work_item(name, inputs=inputs, stream=name == "r") for name in ("r", "quiet")]
    hand.writer.write([LogWrite(hand.names.work("m"), encode_work(item), None, PARTITION) for item in items])
    wait_until(lambda: deltas(hand), "the first delta")
    [engine] = psutil.Process(worker.pid).children()
    engine.kill()
    gate.touch()
    results = {result.request_id: result for result in hand.wait_for_results(2)}
    outputs = results["r"].outputs
    assert outputs is not None
    text = msgspec.json.decode(outputs)["text"]
    told = deltas(hand)
    assert {(delta.request_id, delta.incarnation, delta.provisional) for delta in told} == {("r", "w0-a", True)}
    attempts = [[delta for delta in told if delta.attempt == attempt] for attempt in (0, 1)]
    assert told == [*attempts[0], *attempts[1]]
    for attempt in attempts:
        assert [delta.index for delta in attempt] == list(range(len(attempt)))
        assert text.startswith("".join(delta.text for delta in attempt))
    assert 0 < len(attempts[0]) < len(attempts[1])
    assert "".join(delta.text for delta in attempts[1]) == text
    assert hand.committed() == 2
