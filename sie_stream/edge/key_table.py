"""Reads sie.keys as a whole. Whoever only asks what was shredded imports no cryptography by it, as key_topic does."""

from __future__ import annotations

from sie_stream.edge.tables import read_to_end
from sie_stream.ids import TopicNames
from sie_stream.ports import LogReader
from sie_stream.privacy.datakeys import KeyTable

READ_S = 600.0


def read_key_table(reader: LogReader, names: TopicNames, latest: LogReader | None = None) -> KeyTable:
    """Every data key, and every subject that was shredded. Empty where the topic does not exist.

    `latest`: see read_to_end.
    """
    table = KeyTable()
    for record in read_to_end(reader, names.keys, timeout_s=READ_S, latest=latest):
        table.heed(record.key, record.value)
    return table
