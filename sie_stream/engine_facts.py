"""Facts on sie.cluster about engine processes of a worker that lives; `control` lists them with all others.

An engine that is back tells no fact of its own: its models are loaded again one after another, and each says
ReplicaReady.
"""

from __future__ import annotations

from msgspec import Struct

LOAD_PREFIX = "load:"
"""Before the name of a model whose load is a suspect; everything else in `suspects` is a request id."""


class EngineModel(Struct, frozen=True):
    """A replica that was ready in the engine and is not any more."""

    model: str
    version: str
    placement_epoch: int


class EngineLost(Struct, frozen=True, tag=True):
    """One engine process of a live worker ended unasked. The worker starts it again and loads its models again."""

    worker: str
    incarnation: str
    device: str
    backend: str
    cause: str
    """For people: `SIGKILL (out of memory)`, `SIGSEGV`, `exit 3`, or which limit of time was exceeded."""
    models: tuple[EngineModel, ...] = ()
    requests: int = 0
    """Held by it then. Each is run again, alone if it may have been the cause (gpu_worker/retries.py)."""
    suspects: tuple[str, ...] = ()
    """What may have killed it: ids of the requests it held (the first ones), and the model it was loading."""
    given_up: tuple[str, ...] = ()
    """Those of them that were there too often and end now; they explain the earlier deaths that they were at, too."""
    domain: str = ""
    """See ModelLaunch."""
