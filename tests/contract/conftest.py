"""`world`: every contract test runs once in memory and once on real Kafka."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sie_stream.edge.clock import SystemClock
from tests.contract.world import KafkaWorld, SimWorld, World


@pytest.fixture(params=["sim", pytest.param("kafka", marks=pytest.mark.integration)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "sim":
        yield SimWorld()
        return
    kafka = KafkaWorld(request.getfixturevalue("kafka").bootstrap_servers, SystemClock().now_ms)
    yield kafka
    kafka.close()
