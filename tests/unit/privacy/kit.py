"""A key ring in a temporary folder, and a model whose fields are marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sie_stream.edge.keyring import Keyring, add_kek, create_keyring
from sie_stream.privacy.datakeys import KeyTable, key_write, shred_writes, shredded_now
from sie_stream.privacy.forms import Sealed, changed_forms, hashed_text
from sie_stream.privacy.rules import Rules, rules_of
from sie_stream.privacy.vault import Guard, Opener, Vault
from sie_stream.records import LogWrite
from tests.unit.worker.rig import work_item

TOPIC = "sie.keys"
INPUTS: dict[str, Any] = {
    "properties": {
        "customer": {"type": "string", "pii": "encrypt"},
        "email": {"type": "string", "pii": "hash", "nullable": True},
        "age": {"type": "integer"},
    },
    "required": ["customer"],
}
OUTPUTS: dict[str, Any] = {
    "properties": {
        "reason": {"pii": "encrypt"},
        "twin": {"pii": "hash"},
        "people": {"type": "array", "items": {"type": "object", "properties": {"name": {"pii": "encrypt"}}}},
        "score": {"type": "number"},
    },
}


def rules(subject: str = "customer") -> Rules:
    found = rules_of(json.dumps(INPUTS).encode(), json.dumps(OUTPUTS).encode(), subject)
    assert found is not None
    return found


class Ring:
    """A key ring, the topic of its data keys, and one writer."""

    def __init__(self, folder: Path) -> None:
        self.keyring: Keyring = create_keyring(folder / "ring")
        self.folder = folder / "ring"
        self.topic: list[LogWrite] = []
        self.vault = Vault(self.keyring, TOPIC)
        self.guard = Guard("m", rules(), self.vault)

    def write(self, writes: list[LogWrite]) -> None:
        """Onto the topic, which the writer follows."""
        for one in writes:
            assert one.topic == TOPIC
            self.topic.append(one)
            self.vault.heed(one.key, one.value)

    def table(self) -> KeyTable:
        table = KeyTable()
        for one in self.topic:
            table.heed(one.key, one.value)
        return table

    def opener(self) -> Opener:
        return Opener(self.table(), self.keyring)

    def shred(self, subject: str, at_ms: int = 5) -> None:
        table = self.table()
        fact = shredded_now(table, self.keyring.subject_of(subject.encode()), at_ms, "ada", "asked for")
        self.write(shred_writes(TOPIC, table, fact))

    def rotate(self) -> Keyring:
        """The ring with a new key, which every data key is under now. The writer still has the old one."""
        rotated = add_kek(self.folder)
        self.write([key_write(TOPIC, rotated.rewrap(wrapped)) for wrapped in self.table()])
        return rotated

    def restart(self) -> None:
        """Another writer, which reads the key ring and the topic anew."""
        self.keyring = Keyring(self.folder)
        self.vault = Vault(self.keyring, TOPIC)
        self.guard = Guard("m", rules(), self.vault)
        for one in self.topic:
            self.vault.heed(one.key, one.value)

    def outputs(self, customer: str, outputs: dict[str, Any]) -> bytes:
        """Protected outputs of a request of that customer."""
        work = work_item("r", inputs=json.dumps({"customer": customer}).encode())
        writes: list[LogWrite] = []
        found = self.guard.outputs(work, json.dumps(outputs).encode(), writes)
        assert found is not None
        self.write(writes)
        return found


def opened(opener: Opener, payload: bytes) -> Any:
    """What stands in the encrypted fields of outputs, hashed ones as they are."""
    found = changed_forms(
        payload,
        lambda path, form: opener.opened("m", "outputs", path, form) if isinstance(form, Sealed) else hashed_text(form),
    )
    assert found is not None
    return json.loads(found)
