"""How a server can fail an engine, and what becomes of the requests it held.

ServerRefused     it answered that it will not: `server_refused` (4xx) or `server_error` (5xx), for that request alone
BadAnswer         what it answered is cut off or has another shape than agreed: `server_bad_answer`
Unreachable       the connection failed and the server lives all the same: raised, so that the host tries again
ServerTimeout     no answer in time, but it still says that it is alive: `server_timeout`
ServerDied        it is gone, or alive and deaf. The engine process ends (exit 69) and the host retries what it held, as
                  after any death of an engine; a server that was started here ends with it and is started again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

EXIT_UNAVAILABLE = 69  # EX_UNAVAILABLE of sysexits.h


class ServerFailure(Exception):
    """One exchange failed. `code` is the error code of the requests in it."""

    code = "server_error"


class ServerRefused(ServerFailure):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server answered {status}: {message}")
        self.status = status
        self.code = "server_refused" if 400 <= status < 500 else "server_error"


class BadAnswer(ServerFailure):
    code = "server_bad_answer"


class ServerTimeout(ServerFailure):
    code = "server_timeout"


class Unreachable(ServerFailure):
    """No connection, or it ended without an answer. Whether the server is dead is asked next."""

    code = "server_unreachable"


class ServerDied(SystemExit):
    """Ends the engine process; the reason is on its standard error, which is the worker's log."""

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_UNAVAILABLE)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def verdict(failure: ServerFailure, live: Callable[[], bool], last_words: Callable[[], str]) -> ServerFailure:
    """The failure, as one of the request. Raises ServerDied when the server does not say that it lives.

    A refusal is an answer, so nobody is asked about it.
    """
    if not isinstance(failure, ServerRefused) and not live():
        reason = f"the server does not answer any more: {failure}. {last_words()}".strip()
        sys.stderr.write(f"engine: {reason}\n")
        sys.stderr.flush()
        raise ServerDied(reason) from failure
    return failure
