"""Protected answers in a replay: compared by what they say, told without saying it; shredded ones are a cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from sie_stream.cli.replaying.protected import Protection
from sie_stream.edge.keyring import Keyring, add_kek
from sie_stream.privacy.declared import DeclaredOutputs
from sie_stream.privacy.rules import WITHHELD, rules_of
from sie_stream.privacy.vault import Guard, Opener, Vault
from sie_stream.replay.compare import Again, Original
from sie_stream.replay.report import Place, Report, Tally
from tests.unit.privacy.kit import INPUTS, OUTPUTS, TOPIC, Ring
from tests.unit.worker.rig import launch_of, work_item

LAUNCH = launch_of("m", input_schema=Raw(json.dumps(INPUTS)), output_schema=Raw(json.dumps(OUTPUTS)))
DECLARED = DeclaredOutputs([("m", "1", json.dumps(OUTPUTS).encode())])
PLAIN = {"reason": 41.25, "twin": "Ada Lovelace", "people": [{"name": "Byron"}], "score": 0.5}


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path)


def original(outputs: bytes) -> Original:
    return Original(*("r", "ok", "m", "1", "sha256:aa", "sim", outputs, "", 1, 1, 1.0, 1.0, 1))


def again(outputs: Any, **changes: object) -> Again:
    found = Again("ok", "1", "sha256:aa", "sim", json.dumps(outputs).encode(), seed=1)
    return msgspec.structs.replace(found, **changes)


def test_equal_answers_are_equal_and_near_ones_within_although_neither_is_told(ring: Ring) -> None:
    protection = Protection(ring.opener, DECLARED)
    before = original(ring.outputs("ada", PLAIN))
    assert protection.barrier(before) is None
    found, told_before, told_after = protection.judged(before, again(PLAIN), LAUNCH, 0.0)
    assert found.outcome == "equal"
    assert told_before.outputs == told_after.outputs
    near = again(PLAIN | {"reason": 41.250001})
    assert protection.judged(before, near, LAUNCH, 0.001)[0].outcome == "within"
    other = again(PLAIN | {"twin": "Lord Byron", "people": [{"name": "Ada"}]})
    found, told_before, told_after = protection.judged(before, other, LAUNCH, 0.0)
    assert (found.outcome, found.fields) == ("different", ("people[0].name", "twin"))
    tally = Tally()
    tally.answered(told_before, told_after, Place("t", 0, 0), found)
    report = msgspec.json.encode(tally.finish("t", "", 1.0, partial=False))
    for secret in (b'"Ada"', b"Byron", b"41.25"):
        assert secret not in report + (told_before.outputs or b"") + (told_after.outputs or b"")


def test_answers_from_before_a_rotation_compare_under_their_own_key(ring: Ring) -> None:
    before = original(ring.outputs("ada", PLAIN))
    add_kek(ring.folder)
    protection = Protection(lambda: Opener(ring.table(), type(ring.keyring)(ring.folder)), DECLARED)
    assert protection.judged(before, again(PLAIN), LAUNCH, 0.0)[0].outcome == "equal"


def test_a_worker_that_learns_of_a_rotation_between_two_fields_writes_hashes_under_two_keys(ring: Ring) -> None:
    schema = {"properties": {"a": {"pii": "hash"}, "m": {"pii": "encrypt"}, "z": {"pii": "hash"}}}
    text = json.dumps(schema).encode()
    launch = launch_of("m", input_schema=Raw(json.dumps(INPUTS)), output_schema=Raw(text))
    found = rules_of(json.dumps(INPUTS).encode(), text, "customer")
    assert found is not None
    ring.outputs("ada", PLAIN)
    running = Vault(Keyring(ring.folder), TOPIC)
    ring.rotate()
    for one in ring.topic:
        running.heed(one.key, one.value)
    plain = {"a": 1, "m": 2, "z": 3}
    work = work_item("r", inputs=b'{"customer": "ada"}')
    outputs = Guard("m", found, running).outputs(work, json.dumps(plain).encode(), [])
    assert outputs is not None
    assert outputs.count(b"kek-0001") == outputs.count(b"kek-0002") == 1
    protection = Protection(lambda: Opener(ring.table(), Keyring(ring.folder)), DeclaredOutputs([("m", "1", text)]))
    before = original(outputs)
    assert protection.barrier(before) is None
    assert protection.judged(before, again(plain), launch, 0.0)[0].outcome == "equal"
    other = protection.judged(before, again(plain | {"z": 4}), launch, 0.0)[0]
    assert (other.outcome, other.fields) == ("different", ("z",))


def test_a_shredded_subject_is_a_cause_and_no_failure(ring: Ring) -> None:
    before = original(ring.outputs("ada", PLAIN))
    ring.shred("ada")
    barrier = Protection(ring.opener, DECLARED).barrier(before)
    assert barrier is not None
    assert barrier[0] == "shredded"
    tally = Tally()
    tally.absent(Place("t", 0, 0), "r", "m", *barrier)
    assert _report(tally).causes == {"shredded": 1}
    assert _report(tally).same


def test_without_the_keys_nothing_is_called_equal(ring: Ring) -> None:
    without = Protection(lambda: Opener(ring.table(), None), DECLARED)
    for outputs in (PLAIN, {"twin": "Ada"}):
        barrier = without.barrier(original(ring.outputs("ada", outputs)))
        assert barrier is not None
        assert barrier[0] == "no_key"
        tally = Tally()
        tally.absent(Place("t", 0, 0), "r", "m", *barrier)
        assert not _report(tally).same


def test_new_plain_values_are_hidden_also_where_the_log_has_none(ring: Ring) -> None:
    failed = msgspec.structs.replace(original(b""), status="failed", outputs=None, error_code="died")
    protection = Protection(ring.opener, DECLARED)
    _, _, told = protection.judged(failed, again(PLAIN), LAUNCH, 0.0)
    assert b'"Ada"' not in (told.outputs or b"")
    broken = again({}, status="failed", error_code="x", error_message="cannot read Ada")
    assert protection.judged(failed, broken, LAUNCH, 0.0)[2].error_message == WITHHELD


def test_models_without_marks_are_compared_as_they_are() -> None:
    def load() -> Opener:
        raise AssertionError("the keys are not read for nothing")

    protection = Protection(load, DECLARED)
    before = original(b'{"y":1}')
    assert protection.barrier(before) is None
    found, told, after = protection.judged(before, again({"y": 2}), launch_of("m"), 0.0)
    assert (found.outcome, told, after.outputs) == ("different", before, b'{"y": 2}')


def forged(ring: Ring) -> dict[str, str]:
    """Texts that look like protected values, at a place where none is declared."""
    ring.outputs("eve", {"reason": "x"})
    ring.shred("eve")
    (fact,) = ring.table().shreds.values()
    return {
        "sealed": f"aes-256-gcm:{fact.subject}:{fact.data_keys[0]}:{'A' * 60}",
        "hashed": "hmac-sha256:k:" + "0" * 64,
    }


def test_an_answer_that_only_looks_protected_is_compared_like_any_other(ring: Ring) -> None:
    """Else whoever chooses the text keeps the answer out of every replay."""
    looks = forged(ring)
    protection = Protection(ring.opener, DECLARED)
    before = original(json.dumps(looks).encode())
    assert protection.barrier(before) is None
    assert protection.judged(before, again(looks), LAUNCH, 0.0)[0].outcome == "equal"
    assert protection.judged(before, again(looks | {"sealed": "x"}), LAUNCH, 0.0)[0].outcome == "different"
    unknown = Protection(ring.opener, DeclaredOutputs(())).barrier(before)
    assert unknown is not None
    assert unknown[0] == "shredded"


def test_a_new_answer_that_looks_protected_is_hidden_all_the_same(ring: Ring) -> None:
    failed = msgspec.structs.replace(original(b""), status="failed", outputs=None, error_code="died")
    text = "hmac-sha256:ada-lovelace:" + "0" * 64
    _, _, told = Protection(ring.opener, DECLARED).judged(failed, again({"reason": text, "twin": text}), LAUNCH, 0.0)
    assert b"ada-lovelace" not in (told.outputs or b"")


def test_names_below_a_protected_field_are_not_told(ring: Ring) -> None:
    before = original(ring.outputs("ada", {"reason": {"ada@example.org": [1]}, "people": [{"name": {"Ada": 1}}]}))
    other = again({"reason": {"ada@example.org": [2]}, "people": [{"name": {"Ada": 2}}]})
    found = Protection(ring.opener, DECLARED).judged(before, other, LAUNCH, 0.0)[0]
    assert (found.outcome, found.fields) == ("different", ("people[0].name", "reason"))


def _report(tally: Tally) -> Report:
    return tally.finish("t", "", 1.0, partial=False)
