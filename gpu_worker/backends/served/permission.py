"""Which programs a declaration may start on this worker: those that its operator lists, and none by default.

Whoever may declare models chooses the arguments and variables of such a program, so it should be listed only where
these people may run it anyway. Attaching to a server that runs already needs no permission.
"""

from __future__ import annotations

import shutil

from gpu_worker.backends.base import ModelRefused
from sie_stream.edge.env_settings import load_settings
from sie_stream.errors import did_you_mean


def permit(program: str) -> None:
    """Raises ModelRefused (`server_not_allowed`) for a program that setting launchable_servers does not list."""
    listed = [one for one in map(str.strip, load_settings().launchable_servers.split(",")) if one]
    if (shutil.which(program) or program) in listed:
        return
    raise ModelRefused(
        "server_not_allowed",
        f"backend.config.server: this worker may not start {program!r}.{did_you_mean(program, listed)} Allowed by "
        f"setting launchable_servers: {', '.join(listed) or 'none'}. List it there, or attach to a server with `url`.",
    )
