"""Follows sie.routes and runs one link per foreign topic. A cluster that does not answer stops only its own links."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from processors.bridge.links import ClusterPorts, InLink, OutLink
from processors.follow import RouteFollower
from processors.ingress.decode import Bound
from processors.ingress.routes import text_field_of
from processors.turns import Silence, Watcher
from sie_stream.control import RouteRow
from sie_stream.errors import ConfigError, Fenced, LogError
from sie_stream.ports import Clock
from sie_stream.settings import Settings

RETRY_MS = 5_000
IDLE_WAIT_MS = 250

Link = InLink | OutLink


class BridgePorts(Struct, frozen=True):
    """`cluster("")` is our own; every other one is named by its bootstrap servers. `wait` lets an idle turn rest."""

    cluster: Callable[[str], ClusterPorts]
    wait: Callable[[int], None]
    clock: Clock


class BridgeHost:
    """The bridge process. Call start() once, then turn() for ever, then close()."""

    def __init__(self, settings: Settings, ports: BridgePorts, watcher: Watcher | None = None) -> None:
        self._settings = settings
        self._ports = ports
        self._watcher = watcher or Silence()
        self._reader = ports.cluster("").make_reader(f"{settings.topics.bridge_group}.routes")
        self._routes = RouteFollower(self._reader, settings.topics.routes)
        self._rows: dict[str, RouteRow] = {}
        self._links: dict[str, Link] = {}
        self._wanted: dict[str, RouteRow] = {}
        """Links as they should be: "in:MODEL" and "out:BOOTSTRAP", with a row that says how."""
        self._retry_at_ms: dict[str, float] = {}
        self.carried = 0

    def start(self) -> None:
        """Raises FatalLogError when the route table cannot be read."""
        self._apply(self._routes.read_table())

    def turn(self) -> int:
        """One turn of every link; rests when nothing moved. Raises Fenced when another bridge took over."""
        self._apply(self._routes.changes())
        carried = sum(self._turn_of(key) for key in list(self._wanted))
        self.carried += carried
        if not carried:
            self._ports.wait(IDLE_WAIT_MS)
        return carried

    def close(self) -> None:
        for key in list(self._links):
            self._links.pop(key).close()
        self._reader.close()

    def _apply(self, changes: tuple[tuple[str, RouteRow | None], ...]) -> None:
        for name, row in changes:
            if row is None:
                self._rows.pop(name, None)
            else:
                self._rows[name] = row
        if not changes:
            return
        wanted = {f"in:{name}": row for name, row in sorted(self._rows.items()) if row.input_bootstrap}
        outward = [row for _, row in sorted(self._rows.items()) if row.output_bootstrap and row.output_topic]
        wanted |= {f"out:{row.output_bootstrap}": row for row in outward}
        for key in list(self._links):
            if key not in wanted or (key.startswith("in:") and _inputs(wanted[key]) != _inputs(self._wanted[key])):
                self._links.pop(key).close()
        self._wanted = wanted

    def _turn_of(self, key: str) -> int:
        if self._ports.clock.monotonic_ms() < self._retry_at_ms.get(key, 0.0):
            return 0
        try:
            link = self._links.get(key)
            if link is None:
                link = self._links[key] = self._open(key, self._wanted[key])
                self._watcher.event("link_open", link=link.name)
            if isinstance(link, OutLink):
                bootstrap = key.removeprefix("out:")
                link.rows = {row.instance: row for row in self._rows.values() if row.output_bootstrap == bootstrap}
            return link.turn()
        except Fenced:
            raise
        except (LogError, ConfigError) as trouble:
            self._watcher.event("link_broken", link=key, reason=str(trouble), retry_ms=RETRY_MS)
            self._retry_at_ms[key] = self._ports.clock.monotonic_ms() + RETRY_MS
            broken = self._links.pop(key, None)
            if broken is not None:
                broken.close()
            return 0

    def _open(self, key: str, row: RouteRow) -> Link:
        here = self._ports.cluster("")
        if key.startswith("in:"):
            bound = Bound(row.instance, row.input_deserializer, text_field_of(row))
            return InLink(row, bound, self._settings, here, self._ports.cluster(row.input_bootstrap))
        return OutLink(row.output_bootstrap, self._settings, here, self._ports.cluster(row.output_bootstrap))


def _inputs(row: RouteRow) -> tuple[str, ...]:
    """What an in-link depends on."""
    return (
        row.instance,
        row.input_topic,
        row.input_bootstrap,
        row.input_group,
        row.input_offset_reset,
        row.input_deserializer,
        bytes(row.input_schema).decode(),
    )
