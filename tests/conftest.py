"""Fixtures for every test. `kafka` is one real broker for the whole pytest session."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from sie_stream.edge.broker import BrokerConfig, EmbeddedBroker
from tests.waiting import within

# "ci" draws the same examples in every run, so a red build is red again on a second look; "quick" (make check) draws
# a tenth of them; explore with `pytest --hypothesis-profile=explore`.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("ci"), max_examples=10)
settings.register_profile("explore", deadline=None, max_examples=2_000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

START_BUDGET_S = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a slow test come first: where two processes share the files, none begins the longest one last."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the collector need not go through them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """One embedded broker for the session, shared by all tests: use topic, group and transactional ids of your own.

    `kafka.bootstrap_servers` is where it listens. A test that stops or kills a broker starts its own instead.
    """
    config = BrokerConfig(data_dir=tmp_path_factory.mktemp("kafka"))
    with EmbeddedBroker.start(config, within(START_BUDGET_S)) as broker:
        yield broker


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's SIE_STREAM_* variables must not change what tests see."""
    for name in [name for name in os.environ if name.startswith("SIE_STREAM_")]:
        monkeypatch.delenv(name)
