"""Every error SIE-Stream raises, and what its owner does about it.

SieError
  InvalidRequest      the request itself is wrong: one terminal record `rejected`, never retried
  LogError            Kafka said no
    Retriable         try the same call again
    TransactionAborted  abort, rewind to the committed offsets, go on
    Fenced            another incarnation owns our transactional id: stop at once, commit nothing
    RecordTooLarge    the broker's limit; an oversize result becomes a `failed` terminal record
    FatalLogError     replace the client
  EngineError         the engine process died, hung, or answered nonsense
  ConfigError         a setting or declaration is wrong: says the field, the value, what is allowed
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable


class Disposition(enum.Enum):
    """What the outermost frame does with an error."""

    RETRY = "retry"
    DEAD_LETTER = "dead_letter"
    CRASH = "crash"


class SieError(Exception):
    """Base of all errors of this project."""

    disposition = Disposition.CRASH
    code = "internal_error"


class InvalidRequest(SieError):
    """A request that can never succeed; `field` is a dotted path into the request, or empty."""

    disposition = Disposition.DEAD_LETTER

    def __init__(self, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field


class LogError(SieError):
    """The log (Kafka, or its stand-in) refused or failed."""


class Retriable(LogError):
    disposition = Disposition.RETRY


class TransactionAborted(LogError):
    """The transaction must be aborted; nothing of it will be seen by read_committed readers."""

    disposition = Disposition.RETRY


class Fenced(LogError):
    """A newer incarnation took our transactional id. Whatever we had not committed belongs to it."""


class RecordTooLarge(LogError):
    """One record exceeds the broker's limit."""

    disposition = Disposition.DEAD_LETTER


class FatalLogError(LogError):
    """The client cannot be used any more."""


class EngineError(SieError):
    """The engine process died, hung, or broke its protocol."""


class ConfigError(SieError):
    """A setting, a flag or a declaration is wrong."""

    code = "invalid_config"


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed spelling closest to `word`, or None when nothing is close (difflib ratio >= 0.6)."""
    found = difflib.get_close_matches(word, sorted(allowed), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Text to append to an error message: the nearest spelling, or nothing."""
    guess = nearest(word, allowed)
    return f" Did you mean {guess!r}?" if guess else ""
