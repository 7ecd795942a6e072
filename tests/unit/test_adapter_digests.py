"""Weights digests of adapters: of both, and what is compared where one of two names no base."""

from __future__ import annotations

import pytest

from sie_stream.adapter_digests import over, own_and_base, same_weights


def test_a_digest_over_another_comes_apart_again() -> None:
    assert own_and_base(over("sha256:a", "sha256:b")) == ("sha256:a", "sha256:b")
    assert own_and_base("sha256:a") == ("sha256:a", "")
    assert own_and_base("") == ("", "")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a over b", "a over b", True),
        ("a over b", "a over c", False),
        ("a over b", "c over b", False),
        ("a", "a over b", True),
        ("c", "a over b", False),
    ],
)
def test_what_a_result_does_not_name_is_not_compared(one: str, other: str, same: bool) -> None:
    assert same_weights(one, other) is same_weights(other, one) is same
