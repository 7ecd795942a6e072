"""How tools find Kafka: a flag, the environment, or the `sie-stream up` that runs in this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec

from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.kafka_log import KafkaPlainWriter, KafkaReader, KafkaTransactionalWriter
from sie_stream.edge.kafka_reach import refuse_unreachable
from sie_stream.edge.kafka_reader import FETCH_WAIT_MS
from sie_stream.edge.supervisor import RunState
from sie_stream.errors import ConfigError
from sie_stream.settings import Settings


class NotRunning(ConfigError):
    """No Kafka to talk to."""

    code = "not_running"


class Connection:
    """Settings with a known bootstrap, and the clients made from them."""

    def __init__(self, settings: Settings) -> None:
        assert settings.bootstrap_servers, "use Connection.open"
        self.settings = settings

    @classmethod
    def open(cls, bootstrap_servers: str | None = None) -> Self:
        """Raises NotRunning when neither a flag, nor the environment, nor a local run says where Kafka is, and NoBroker
        when nothing listens there.
        """
        settings = cls._found(load_settings({"bootstrap_servers": bootstrap_servers} if bootstrap_servers else {}))
        refuse_unreachable(settings.bootstrap_servers)
        return cls(settings)

    @staticmethod
    def _found(settings: Settings) -> Settings:
        if settings.bootstrap_servers:
            return settings
        state = RunState.load(Path(settings.state_dir))
        if state is None:
            raise NotRunning(
                f"no running SIE-Stream found in {Path(settings.state_dir).absolute()}. Go to the folder where you ran "
                "`sie-stream up`, start one here with `sie-stream up --detach`, "
                "or name a Kafka cluster with --bootstrap-servers or SIE_STREAM_BOOTSTRAP_SERVERS."
            )
        return msgspec.structs.replace(settings, bootstrap_servers=state.bootstrap_servers)

    def reader(self, group: str = "sie-stream-tools", fetch_wait_ms: int = FETCH_WAIT_MS) -> KafkaReader:
        overrides = self.settings.client_overrides
        return KafkaReader(self.settings.bootstrap_servers, group, overrides=overrides, fetch_wait_ms=fetch_wait_ms)

    def latest_reader(self, group: str = "sie-stream-tools", fetch_wait_ms: int = FETCH_WAIT_MS) -> KafkaReader:
        """Its end offsets are high watermarks: with the records of open transactions, which the others do not see."""
        overrides = self.settings.client_overrides | {"isolation.level": "read_uncommitted"}
        return KafkaReader(self.settings.bootstrap_servers, group, overrides=overrides, fetch_wait_ms=fetch_wait_ms)

    def transactional_writer(self, transactional_id: str) -> KafkaTransactionalWriter:
        settings = self.settings
        return KafkaTransactionalWriter(
            settings.bootstrap_servers, transactional_id, settings.transaction_timeout_ms, settings.client_overrides
        )

    def plain_writer(self) -> KafkaPlainWriter:
        return KafkaPlainWriter(self.settings.bootstrap_servers, overrides=self.settings.client_overrides)
