"""Protected values: round trips, rotation, shredding, and no plain value in what is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_stream.edge.keyring import Keyring, create_keyring
from sie_stream.errors import ConfigError
from sie_stream.privacy.datakeys import KeyTable, WrappedKey
from sie_stream.privacy.forms import read_form, sealed_in
from sie_stream.privacy.vault import KeyUnavailable, Opener, Vault
from sie_stream.records import LogWrite
from tests.unit.privacy.kit import TOPIC, Ring, opened
from tests.unit.worker.rig import work_item

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=30)
VALUE = st.one_of(TEXT, st.integers(-(2**53), 2**53), st.booleans(), st.lists(TEXT, max_size=3))


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path)


@pytest.fixture(scope="module")
def shared() -> Iterator[Ring]:
    with TemporaryDirectory() as folder:
        yield Ring(Path(folder))


@given(customer=TEXT, reason=VALUE, twin=VALUE, names=st.lists(TEXT, max_size=3))
def test_what_is_protected_can_be_read_by_the_holder_of_the_keys(
    shared: Ring, customer: str, reason: Any, twin: Any, names: list[str]
) -> None:
    plain = {"reason": reason, "twin": twin, "people": [{"name": name} for name in names], "score": 0.5}
    written = shared.outputs(customer, plain)
    again = opened(shared.opener(), written)
    assert again["twin"] == json.loads(shared.outputs(customer, plain))["twin"]  # equal values, equal hashes
    assert again | {"twin": twin} == plain


def test_no_plain_value_is_left_in_what_is_written(ring: Ring) -> None:
    secrets = ["Ada Lovelace", "ada@example.org", "12 St James", "customer-17"]
    written = ring.outputs(secrets[3], {"reason": secrets[0], "twin": secrets[1], "people": [{"name": secrets[2]}]})
    work = work_item(
        "r",
        inputs=json.dumps({"customer": secrets[3], "email": secrets[1], "age": 36}).encode(),
        token_ids=(1, 2),
    )
    letter = ring.guard.work(work, [])
    everything = written + letter.inputs + b"".join((one.key or b"") + (one.value or b"") for one in ring.topic)
    for secret in secrets:
        assert secret.encode() not in everything
    assert json.loads(letter.inputs)["age"] == 36
    assert letter.token_ids is None


def test_whose_values_they_are_is_found_out_once_for_all_of_a_result(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    def subject_of(subject: bytes) -> str:
        asked.append(subject)
        return Keyring.subject_of(ring.keyring, subject)

    monkeypatch.setattr(ring.keyring, "subject_of", subject_of)
    written = ring.outputs("ada", {"reason": "x", "people": [{"name": str(number)} for number in range(50)]})
    assert (asked, len(sealed_in(written)), written.count(b"aes-256-gcm:")) == ([b"ada"], 1, 51)


def test_a_subject_has_one_data_key_and_two_subjects_have_two(ring: Ring) -> None:
    for customer in ("ada", "ada", "bob"):
        ring.outputs(customer, {"reason": "x"})
    assert len(ring.topic) == 2
    other = Vault(ring.keyring, TOPIC)  # another worker, which follows the topic
    for one in ring.topic:
        other.heed(one.key, one.value)
    writes: list[LogWrite] = []
    assert other.data_key(b"ada", writes) == ring.vault.data_key(b"ada", writes)
    assert writes == []


def test_without_a_declared_subject_the_session_names_it(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    assert ring.guard.rules.subject_of(work_item("r", inputs=b'{"customer":7}', session="s")) == b"7"
    assert ring.guard.rules.subject_of(work_item("r", inputs=b"{}", session="s", key=b"k")) == b"s"
    assert ring.guard.rules.subject_of(work_item("r", inputs=b"{}", key=b"k")) == b"k"
    assert ring.guard.rules.subject_of(work_item("r", inputs=b"{}")) == b"r"


def test_a_shredded_subject_can_never_be_read_and_others_can(ring: Ring) -> None:
    ada, bob = ring.outputs("ada", {"reason": "secret"}), ring.outputs("bob", {"reason": "other"})
    ring.shred("ada")
    table = ring.table()
    assert table.any_shredded(ada)
    assert not table.any_shredded(bob)
    with pytest.raises(KeyUnavailable, match="was shredded") as caught:
        opened(ring.opener(), ada)
    assert caught.value.shredded
    assert opened(ring.opener(), bob)["reason"] == "other"
    kept = [
        one for one in {one.key: one for one in ring.topic}.values() if one.value is not None
    ]  # what compaction keeps
    (by,) = sealed_in(ada)
    assert not any(by.data_key.encode() in (one.key or b"") for one in kept)


STEPS = st.lists(
    st.tuples(st.sampled_from(["answer", "answer", "shred", "rotate", "restart"]), st.sampled_from("abc")), max_size=12
)


@given(STEPS)
def test_whatever_happens_a_value_is_readable_until_its_subject_is_shredded(steps: list[tuple[str, str]]) -> None:
    with TemporaryDirectory() as folder:
        ring = Ring(Path(folder))
        written: list[tuple[str, bytes, bool]] = []
        for step, subject in steps:
            if step == "answer":
                written.append((subject, ring.outputs(subject, {"reason": f"of {subject}"}), True))
            elif step == "shred":
                ring.shred(subject)
                written = [(whose, outputs, known and whose != subject) for whose, outputs, known in written]
            elif step == "rotate":
                ring.rotate()
            else:
                ring.restart()
        for subject, outputs, readable in written:
            assert ring.table().any_shredded(outputs) is not readable
            if readable:
                assert opened(ring.opener(), outputs) == {"reason": f"of {subject}"}


def test_after_shredding_a_subject_begins_anew(ring: Ring) -> None:
    old = ring.outputs("ada", {"reason": "old"})
    ring.shred("ada")
    new = ring.outputs("ada", {"reason": "new"})
    assert sealed_in(new) != sealed_in(old)
    assert opened(ring.opener(), new)["reason"] == "new"
    ring.shred("ada", at_ms=6)
    (fact,) = ring.table().shreds.values()
    assert len(fact.data_keys) == 2
    assert ring.table().any_shredded(old)
    assert ring.table().any_shredded(new)


def test_rotation_rewraps_and_old_data_stays_readable(ring: Ring) -> None:
    before = ring.outputs("ada", {"reason": "x", "twin": "y"})
    assert (ring.keyring.current, ring.rotate().current) == ("kek-0001", "kek-0002")
    assert [wrapped.kek for wrapped in ring.table()] == ["kek-0002"]
    ring.folder.joinpath("kek-0001.key").rename(ring.folder / "away")
    opener = Opener(ring.table(), Keyring(ring.folder))
    assert opened(opener, before)["reason"] == "x"
    # A process that still runs with the old key ring reads the folder again.
    assert opened(ring.opener(), before)["reason"] == "x"


def test_a_sealed_value_opens_only_where_it_was_written(ring: Ring) -> None:
    written = json.loads(ring.outputs("ada", {"reason": "x"}))
    form = read_form(written["reason"])
    assert form is not None
    opener = ring.opener()
    assert opener.opened("m", "outputs", "reason", form) == "x"  # type: ignore[arg-type]
    for place in (("other", "outputs", "reason"), ("m", "inputs", "reason"), ("m", "outputs", "name")):
        with pytest.raises(KeyUnavailable, match="another key, place or content"):
            opener.opened(*place, form)  # type: ignore[arg-type]


def test_a_table_forgets_the_first_subjects_beyond_its_size_and_bears_strangers(ring: Ring) -> None:
    table = KeyTable(subjects_max=2)
    for customer in ("a", "b", "c"):
        ring.outputs(customer, {"reason": "x"})
    for one in [*ring.topic, LogWrite(TOPIC, b"?", b"key:x:y"), LogWrite(TOPIC, b"", b"other"), LogWrite(TOPIC, None)]:
        table.heed(one.key, one.value)
    assert len(list(table)) == 2
    assert table.unreadable == 3


def test_key_rings_are_private_whole_and_never_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "ring"
    with pytest.raises(ConfigError, match="keys create"):
        Keyring(folder)
    create_keyring(folder)
    with pytest.raises(ConfigError, match="never written over"):
        create_keyring(folder)
    (folder / "index.key").rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=r"kek-0001\.key exists"):
        create_keyring(folder)
    assert not (folder / "index.key").exists()
    (tmp_path / "away").rename(folder / "index.key")
    (folder / "kek-0001.key").chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0640 lets others read it; allowed is 0600"):
        Keyring(folder)
    (folder / "kek-0001.key").unlink()
    with pytest.raises(ConfigError, match="no key-encryption key"):
        Keyring(folder)


def test_a_newer_key_that_others_may_read_is_refused_and_told_once_while_work_goes_on(ring: Ring) -> None:
    told: list[str] = []
    running = Vault(Keyring(ring.folder, told.append), TOPIC)
    before = ring.outputs("ada", {"reason": "old"})
    ring.rotate()
    newer = ring.folder / "kek-0002.key"
    newer.chmod(0o644)
    (ring.folder / "kek-0001.key").chmod(0o640)  # in use already: what happens to the file now changes nothing
    for one in ring.topic:
        running.heed(one.key, one.value)
    for subject in (b"ada", b"bob"):
        writes: list[LogWrite] = []
        running.data_key(subject, writes)
        assert [decode_key(one) for one in writes] == ["kek-0001"]
    (line,) = told
    for part in (str(newer), "mode 0644", f"chmod 600 {newer}", "kek-0001 stays in use"):
        assert part in line
    with pytest.raises(KeyUnavailable, match="mode 0644 lets others read it"):
        opened(Opener(ring.table(), running.cipher), before)
    newer.chmod(0o600)
    assert opened(Opener(ring.table(), running.cipher), before)["reason"] == "old"
    assert running.cipher.current == "kek-0002"


@pytest.mark.parametrize("content", [b"", b"not hexadecimal", b"00ff\n"])
def test_a_newer_key_that_is_half_copied_is_refused_too(ring: Ring, content: bytes) -> None:
    told: list[str] = []
    running = Keyring(ring.folder, told.append)
    newer = ring.folder / "kek-0002.key"
    newer.write_bytes(content)
    newer.chmod(0o600)
    with pytest.raises(KeyUnavailable, match="is not used"):
        running.digest("kek-0002", b"x")
    assert len(told) == 1
    assert running.current == "kek-0001"


def test_only_numbered_keys_are_keys(ring: Ring) -> None:
    """A copy that somebody keeps beside them would else be the current one: names sort after digits."""
    copy = ring.folder / "kek-0001 copy.key"
    copy.write_bytes((ring.folder / "kek-0001.key").read_bytes())
    assert Keyring(ring.folder).current == "kek-0001"
    assert ring.rotate().current == "kek-0002"


def decode_key(write: LogWrite) -> str:
    return msgspec.json.decode(write.value or b"", type=WrappedKey).kek
