"""Signs of life: quiet while there are some, loud when there were none for too long."""

from __future__ import annotations

import pytest

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
