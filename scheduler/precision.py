"""In which of its preferred precisions a replica is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.device_classes import DeviceKind, precisions_of
from sie_stream.backend_facts import PRECISIONS_OF_KIND
from sie_stream.spec import ModelSpec

KINDS: Mapping[str, DeviceKind] = {"cpu": "cpu", "cuda": "cuda", "mig": "mig"}


def choices_of(spec: ModelSpec) -> tuple[str, ...]:
    """Precisions that a replica may be loaded in, best first: what `backend.config.precision` names, where that is
    preferred too, else the preferred ones that the backend loads. Empty: backend.config alone decides.

    Where the backend loads none of them, all stay: it refuses the first by name.
    """
    loads = PRECISIONS_OF_KIND.get(spec.backend.name, {}).get(str(spec.backend.config.get("kind")))
    if loads is None:
        return ()
    given = spec.backend.config.get("precision")
    if given in spec.preferred_precision:
        return (str(given),)
    return tuple(one for one in spec.preferred_precision if one in loads) or spec.preferred_precision


def precision_on(choices: Sequence[str], kind: str, product: str) -> str:
    """The first that the device computes; where it computes none, the first. Empty: there is no choice."""
    computes = precisions_of(KINDS.get(kind, "cuda"), product)
    return next((one for one in choices if one in computes), choices[0] if choices else "")
