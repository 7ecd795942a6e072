"""Buckets of numbers: every finite one has a bucket, whatever a model answers."""

from __future__ import annotations

import pytest

from sie_stream.sketch import BUCKET_MAX, bucket_of


@pytest.mark.parametrize("value", [1e308, 1.7976931348623157e308, 1e200])
def test_numbers_beyond_all_buckets_are_in_the_last(value: float) -> None:
    assert bucket_of(value) == BUCKET_MAX
    assert bucket_of(-value) == -BUCKET_MAX
