"""Labels and taints, as people write them in settings."""

from __future__ import annotations

import pytest

from sie_stream.control import Taint
from sie_stream.errors import ConfigError
from sie_stream.settings import settings_from
from sie_stream.worker_marks import parse_labels, parse_taints


def test_labels() -> None:
    assert parse_labels(" gpu=a100, zone=eu-1,empty=,") == {"gpu": "a100", "zone": "eu-1", "empty": ""}
    assert parse_labels("") == {}


def test_taints() -> None:
    assert parse_taints("spot=true:NoSchedule, dedicated:NoExecute") == (
        Taint("spot", "true", "NoSchedule"),
        Taint("dedicated", "", "NoExecute"),
    )


@pytest.mark.parametrize("text", ["gpu", "=a100", "gpu=a100,gpu=h100"])
def test_wrong_labels_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_labels(text)


def test_a_wrong_effect_is_refused_with_the_nearest_spelling() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'NoSchedule'"):
        settings_from({"worker_taints": "spot=true:NoShedule"})


def test_a_wrong_tier_is_refused_when_settings_are_read() -> None:
    with pytest.raises(ConfigError, match="tier-0, tier-1, tier-2, or empty"):
        settings_from({"worker_tier": "tier-9"})
