"""The log on real Kafka: implements ports over confluent-kafka (librdkafka). The twin in memory is sim/log.py."""

from __future__ import annotations

from sie_stream.edge.kafka_errors import classify
from sie_stream.edge.kafka_fence import fence
from sie_stream.edge.kafka_group import KafkaGroupReader
from sie_stream.edge.kafka_reader import KafkaReader
from sie_stream.edge.kafka_writer import KafkaPlainWriter, KafkaTransactionalWriter

__all__ = ["KafkaGroupReader", "KafkaPlainWriter", "KafkaReader", "KafkaTransactionalWriter", "classify", "fence"]
