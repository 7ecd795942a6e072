"""Serves families of metrics to Prometheus over HTTP. The library writes the text and answers; we only hand over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from processors.metrics.families import Family, HistogramFamily
from sie_stream.errors import ConfigError

_KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


class Exporter:
    """A collector over the newest families. Its own threads answer; `publish` may be called from any."""

    def __init__(self, host: str, port: int) -> None:
        """Raises ConfigError when the port is taken or may not be used."""
        self._families: tuple[Family | HistogramFamily, ...] = ()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served at {host}:{port}: {error.strerror}. Try another port."
            ) from error
        self.port: int = self._server.server_port

    def publish(self, families: tuple[Family | HistogramFamily, ...]) -> None:
        self._families = families

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def describe(self) -> list[Metric]:
        """None in advance: names may come and go."""
        return []

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            if isinstance(family, HistogramFamily):
                histogram = HistogramMetricFamily(family.name, family.text, labels=family.labels)
                for labels, buckets, total in family.samples:
                    histogram.add_metric(labels, buckets=list(buckets), sum_value=total)
                yield histogram
                continue
            metric: Any = _KINDS[family.kind](family.name, family.text, labels=family.labels)
            for labels, value in family.samples:
                metric.add_metric(labels, value)
            yield metric
