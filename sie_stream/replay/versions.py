"""Which declaration answers: the version that is asked for, or the one that answered then."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from sie_stream.adapter_digests import over, own_and_base
from sie_stream.control import ModelLaunch, RouteRow
from sie_stream.errors import ConfigError, did_you_mean


class Declared(Struct, frozen=True):
    """One ApplyModel or StartRollout on sie.cluster, as the scheduler understands it."""

    offset: int
    at_ms: int
    launch: ModelLaunch
    route: RouteRow
    beside: bool = False
    """A variant beside what serves: ingress goes on with the schemas and bindings of the version that was applied."""


class Withdrawn(Struct, frozen=True):
    """A DeleteModel on sie.cluster."""

    at_ms: int
    model: str


class Unavailable(Struct, frozen=True):
    """Why nothing can answer for this version; counted as cause `version`."""

    reason: str


class VersionBook:
    """Every declaration that the log still holds, oldest first."""

    def __init__(self, history: Iterable[Declared | Withdrawn]) -> None:
        self.history = tuple(history)
        self._by_model: dict[str, list[Declared]] = {}
        for one in self.history:
            if isinstance(one, Declared):
                self._by_model.setdefault(one.launch.model, []).append(one)

    def models(self) -> list[str]:
        return sorted(self._by_model)

    def input_topics(self) -> frozenset[str]:
        """Topics of their own that models read from, or did."""
        declared = (one for found in self._by_model.values() for one in found)
        return frozenset(one.route.input_topic for one in declared if one.route.input_topic)

    def pinned(self, model: str, version: str) -> Declared:
        """The newest declaration of `model` at `version`. Raises ConfigError naming what there is."""
        declared = self._by_model.get(model)
        if not declared:
            raise ConfigError(
                f"--model {model!r}: no declaration of it is on the control log.{did_you_mean(model, self.models())}"
            )
        if not version:
            return declared[-1]
        for one in reversed(declared):
            if one.launch.version == version:
                return one
        known = list(dict.fromkeys(one.launch.version for one in declared))
        raise ConfigError(
            f"--model {model}@{version}: that version was never declared. Declared: {', '.join(known)}."
            f"{did_you_mean(version, known)} `sie-stream apply` declares one; a declaration that is refused for want "
            "of room can be replayed as well."
        )

    def as_it_was(self, model: str, version: str, digest: str, at_ms: int) -> Declared | Unavailable:
        """The declaration in force at `at_ms` that gave answers of `version` from weights of `digest`.

        The launch demands that digest, of an adapter also that of its base, so an engine refuses weights that are not
        those any more.
        """
        same = [one for one in self._by_model.get(model, ()) if one.launch.version == version]
        if not same:
            return Unavailable(f"{model}@{version}: its declaration is not on the control log (any more).")
        own, base = own_and_base(digest)
        fitting = [one for one in same if _fits(one.launch, own, base)]
        if not fitting:
            return Unavailable(
                f"{model}@{version}: answered with weights {digest or 'unknown'}, but every declaration of that "
                f"version names {_named(same[-1].launch)}."
            )
        before = [one for one in fitting if one.at_ms <= at_ms]
        one = before[-1] if before else fitting[0]
        config = one.launch.config | ({"base_digest": base} if base else {})
        return replace(one, launch=replace(one.launch, weights_digest=own, config=config))


def _fits(launch: ModelLaunch, own: str, base: str) -> bool:
    """Whether these weights may be the declared ones. Of a base that the result does not name, any."""
    if launch.weights_digest not in ("", own):
        return False
    return not base or (bool(launch.config.get("base")) and launch.config.get("base_digest") in (None, "", base))


def _named(launch: ModelLaunch) -> str:
    own, base = launch.weights_digest or "any", launch.config.get("base_digest")
    return over(own, str(base)) if base else own


def model_and_version(text: str) -> tuple[str, str]:
    """`name`, or `name@version`."""
    name, _, version = text.partition("@")
    return name, version
