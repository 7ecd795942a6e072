"""Quotas."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sie_stream.admission import TENANTS_MAX, Quotas


def test_burst_then_rate() -> None:
    quotas = Quotas()
    assert sum(quotas.admit("m", "t", 10.0, 20.0, 0) for _ in range(50)) == 20
    assert sum(quotas.admit("m", "t", 10.0, 20.0, 1_000) for _ in range(50)) == 10


def test_tenants_and_models_have_their_own_buckets() -> None:
    quotas = Quotas()
    asked = [("a", "x"), ("a", "y"), ("b", "x")]
    assert all(quotas.admit(model, tenant, 1.0, 1.0, 0) for model, tenant in asked)
    assert not any(quotas.admit(model, tenant, 1.0, 1.0, 0) for model, tenant in asked)


def test_rate_zero_is_unlimited() -> None:
    quotas = Quotas()
    assert all(quotas.admit("m", "", 0.0, 0.0, 0) for _ in range(1_000))


def test_the_number_of_tenants_is_bounded() -> None:
    quotas = Quotas()
    for tenant in range(TENANTS_MAX + 10):
        quotas.admit("m", str(tenant), 1.0, 1.0, 0)
    assert len(quotas._buckets) == TENANTS_MAX


@given(st.lists(st.integers(-50, 400), min_size=1, max_size=80), st.floats(1, 50), st.floats(1, 50))
def test_never_more_than_burst_plus_rate_times_time(steps: list[int], rate: float, burst: float) -> None:
    quotas = Quotas()
    now_ms = latest_ms = admitted = 0
    for step in steps:
        now_ms = max(0, now_ms + step)
        latest_ms = max(latest_ms, now_ms)
        admitted += quotas.admit("m", "t", rate, burst, now_ms)
        assert admitted <= burst + rate * latest_ms / 1000 + 1e-6
