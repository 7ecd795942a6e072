"""Whether a server's version is one that was tried."""

from __future__ import annotations

import re

from gpu_worker.backends.base import ModelRefused

_NUMBERS = re.compile(r"v?(\d+(?:\.\d+)*)")


def numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 23) of `0.5.23+cpu`; empty for what is no version."""
    found = _NUMBERS.match(version.strip())
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def require(server: str, version: str, least: str, below: str = "") -> None:
    """Raises ModelRefused (server_version_unsupported) unless least <= version < below."""
    found = numbers(version)
    if not found or found < numbers(least) or (below and found >= numbers(below)):
        wanted = f">={least}" + (f",<{below}" if below else "")
        raise ModelRefused(
            "server_version_unsupported",
            f"the server is {server} {version or '(no version)'}, this backend speaks with {wanted}. Install such a "
            "version where the server runs, or use another server.",
        )
