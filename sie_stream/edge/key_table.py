"""Reads sie.keys as a whole. Whoever only asks what was shredded imports no cryptography by it, as key_topic does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

from sie_stream.edge.connection import Connection
from sie_stream.edge.tables import read_to_end
from sie_stream.ids import TopicNames
from sie_stream.ports import LogReader
from sie_stream.privacy.datakeys import KeyTable

READ_S = 600.0


class KeyReaders(NamedTuple):
    """What is committed, and how far the log goes with open transactions."""

    committed: LogReader
    latest: LogReader


def read_key_table(readers: KeyReaders, names: TopicNames) -> KeyTable:
    """Every data key, and every subject that was shredded. Empty where the topic does not exist.

    Transactions that are open now are waited for, at most as long as Kafka lets them be open: until then they hide what
    others committed behind them, such as the key of a result that can be read already.
    """
    table = KeyTable()
    for record in read_to_end(readers.committed, names.keys, timeout_s=READ_S, latest=readers.latest):
        table.heed(record.key, record.value)
    return table


@contextmanager
def key_readers(connection: Connection) -> Iterator[KeyReaders]:
    """Readers of their own, closed in the end."""
    with closing(connection.reader()) as committed, closing(connection.latest_reader()) as latest:
        yield KeyReaders(committed, latest)


def key_table_of(connection: Connection) -> KeyTable:
    """As read_key_table, of the cluster that a tool talks to."""
    with key_readers(connection) as readers:
        return read_key_table(readers, connection.settings.topics)
