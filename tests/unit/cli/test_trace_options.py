"""`sie-stream trace`: options that ask for nothing are refused before anything is read."""

from __future__ import annotations

import pytest

from sie_stream.cli.trace import trace
from sie_stream.errors import ConfigError


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_request_id_is_told_as_such_and_not_looked_for(empty: str) -> None:
    with pytest.raises(ConfigError, match="it is empty; is a variable of your shell not set"):
        trace(request_id=empty)


def test_nothing_to_trace_is_told() -> None:
    with pytest.raises(ConfigError, match="name one request"):
        trace()
