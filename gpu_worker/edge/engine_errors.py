"""What an engine process says of an error that a backend raised: in its log, and to the host."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from sie_stream.control import ModelLaunch
from sie_stream.privacy.rules import WITHHELD, rules_of

MESSAGE_CHARS_MAX = 2_000
Tell = Callable[[BaseException], str]
"""Writes an error to the log; returns what the host is told."""


def tell_of(launch: ModelLaunch) -> Tell:
    """Raises SpecError for a schema that cannot be compiled."""
    rules = rules_of(bytes(launch.input_schema), bytes(launch.output_schema), launch.privacy_subject)
    return tell_all if rules is None else tell_where


def tell_all(error: BaseException) -> str:
    traceback.print_exception(error)
    return shorten(error)


def tell_where(error: BaseException) -> str:
    """Its type and the lines it came from, for models with protected fields."""
    traceback.print_tb(error.__traceback__)
    said = f"{type(error).__name__}: {WITHHELD}"
    sys.stderr.write(f"{said}\n")
    return said


def shorten(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MESSAGE_CHARS_MAX]
