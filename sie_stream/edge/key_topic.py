"""Opens the data keys of sie.keys, and the two who change what is on it: shredding and rotation. Over ports only.

Both take names.keys_transactional_id first, so neither writes a data key again that the other one is shredding. Workers
only add keys, and never one that was there. Both wait for transactions that are open when they begin: an open one hides
the keys that other workers committed after it, whose results may be read already.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sie_stream.edge.connection import Connection
from sie_stream.edge.key_table import KeyReaders, key_table_of, read_key_table
from sie_stream.edge.keyring import Keyring
from sie_stream.errors import ConfigError, SieError
from sie_stream.ids import TopicNames
from sie_stream.ports import TransactionalWriter
from sie_stream.privacy.datakeys import KeyTable, Shredded, key_write, shred_writes, shredded_now
from sie_stream.privacy.vault import KeyUnavailable, Opener

KEYS_AT_ONCE = 5_000


class NothingHeld(SieError):
    """There is nothing to shred, and nothing ever was: nothing is recorded."""

    code = "nothing_held"


def open_keys(connection: Connection) -> Opener:
    """The data keys as they are now, and the key ring of the settings, if there is one.

    Raises ConfigError for a key ring that cannot be used.
    """
    settings = connection.settings
    ring = Keyring(Path(settings.pii_keys)) if settings.pii_keys else None
    return Opener(key_table_of(connection), ring)


def shred(
    readers: KeyReaders,
    writer: TransactionalWriter,
    names: TopicNames,
    subject: str,
    told: tuple[int, str, str],
) -> tuple[Shredded, int]:
    """The fact that is on the log now, and how many data keys it removed.

    A subject that was shredded and has no key since keeps the fact of then. subject: as the key ring calls it. told:
    when (ms), who, why. Raises NothingHeld for a subject that the log does not know, Fenced when somebody else came
    after us.
    """
    writer.init()
    table = _existing(readers, names)
    removed = len(table.of(subject))
    if not removed:
        if (earlier := table.shreds.get(subject)) is not None:
            return earlier, 0
        raise NothingHeld(
            f"nothing is held for this person: {names.keys} has no data key of subject {subject}, and never had. "
            "Is the person spelt as in the requests? Fields marked `hash` need no data key."
        )
    fact = shredded_now(table, subject, *told)
    writer.begin()
    writer.write(shred_writes(names.keys, table, fact))
    writer.commit()
    return fact, removed


class Rewrapped(NamedTuple):
    current: str
    """The key-encryption key that data keys are under now."""
    rewrapped: int
    unknown: int
    """Data keys that the ring cannot unwrap, and so are as they were."""


def rewrap(
    readers: KeyReaders, writer: TransactionalWriter, names: TopicNames, newer: Callable[[], Keyring]
) -> Rewrapped:
    """Puts every data key under the current key-encryption key of the ring that `newer` gives.

    `newer` is called when the topic was found and read: what it makes on disk has to stay from then on.

    Raises Fenced when somebody else came after us: what was done stays, and the rest is done by another call.
    """
    writer.init()
    table = _existing(readers, names)
    ring = newer()
    old = [wrapped for wrapped in table if wrapped.kek != ring.current]
    unknown = 0
    for begin in range(0, len(old), KEYS_AT_ONCE):
        writes = []
        for wrapped in old[begin : begin + KEYS_AT_ONCE]:
            try:
                writes.append(key_write(names.keys, ring.rewrap(wrapped)))
            except KeyUnavailable:
                unknown += 1
        if writes:
            writer.begin()
            writer.write(writes)
            writer.commit()
    return Rewrapped(ring.current, len(old) - unknown, unknown)


def _existing(readers: KeyReaders, names: TopicNames) -> KeyTable:
    if not readers.committed.partitions_of(names.keys):
        raise ConfigError(f"topic {names.keys!r} does not exist. Create it with `sie-stream topics apply`.")
    return read_key_table(readers, names)
