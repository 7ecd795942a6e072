"""Signs of life: quiet while there are some, loud when there were none for too long."""

from __future__ import annotations

import pytest

from sie_stream.edge import kafka_pulse
from sie_stream.edge.kafka_pulse import Pulse
from sie_stream.errors import FatalLogError


def test_a_client_that_works_is_left_alone() -> None:
    pulse = Pulse("nothing delivered", silence_s=60)
    pulse.check()
    pulse.alive()
    pulse.check()


def test_silence_beyond_the_limit_says_what_and_how_long() -> None:
    with pytest.raises(FatalLogError, match="nothing delivered for"):
        Pulse("nothing delivered", silence_s=-1).check()


def test_a_fresh_sign_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look may cost more than what it watches."""
    now_s = 100.0
    monkeypatch.setattr(kafka_pulse.time, "monotonic", lambda: now_s)
    pulse = Pulse("nothing delivered")
    assert not pulse.look_due()
    now_s += kafka_pulse.LOOK_EVERY_S
    assert pulse.look_due()
    pulse.alive()
    assert not pulse.look_due()
