"""Records of rollouts: variants of a route, what they answered, and which ingress holds which route."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from sie_stream.ids import variant_unit
from sie_stream.records import Headers, header

Sketch = dict[int, int]
"""{bucket: count} of a number; buckets as in sie_stream/sketch.py."""


class VariantStats(Struct, frozen=True):
    """What one version answered in some span of time. Counts only, so that spans add up."""

    ok: int = 0
    failed: int = 0
    """Without an answer, `schema_violations` among them."""
    expired: int = 0
    schema_violations: int = 0
    """Answers that the model's output_schema refused."""
    busy_us: int = 0
    """Engine time: of each answer its part of its batch."""
    tokens: int = 0
    latency: Sketch = {}
    """Milliseconds from the request's timestamp to its result, of `ok`."""
    scores: dict[str, Sketch] = {}
    """By numeric output field."""
    labels: dict[str, dict[str, int]] = {}
    """By output field that holds short texts or booleans: how often each value came."""
    pinned: int = 0
    """Of all these, those that came whatever their key. Who pins requests chooses them: what was answered to them is in
    no score and no label, since others' answers are no measure of it.
    """

    @property
    def samples(self) -> int:
        return self.ok + self.failed + self.expired

    @property
    def by_key(self) -> int:
        """Those that stand for all traffic."""
        return self.samples - self.pinned


class VariantWindow(Struct, frozen=True, tag=True):
    """What one variant of a model answered in [start_ms, end_ms) of the timestamps on sie.results."""

    model: str
    variant: str
    version: str
    start_ms: int
    end_ms: int
    complete: bool
    """False: the reader came or lost its place inside the window, so something may be missing."""
    stats: VariantStats
    reporter: str = ""
    offsets: tuple[tuple[int, int, int], ...] = ()
    """(partition, first, next) of sie.results that the window was read from."""


class RoutesHeld(Struct, frozen=True, tag=True):
    """An ingress process routes by these epochs from now on, and will never write by an older one again.

    Empty `epochs`: it lives, and nothing changed. `left`: it stopped cleanly.
    """

    ingress: str
    epochs: dict[str, int] = {}
    """{model: route_epoch}; 0: the route is gone."""
    left: bool = False


class VariantRow(Struct, frozen=True):
    variant: str
    version: str
    weight: int
    """Share of the keys, out of 10,000; the weights of a route add up to that."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Buckets [first, end) of the 10,000 that are its own. Empty in all rows: they follow from the weights."""
    topic: str = ""
    """Its own work topic; empty: that of the route."""
    width: int = 0
    """Buckets per lane of its own topic."""
    shadow: int = 0
    """Share of the keys, out of 10,000, whose requests it gets a copy of; what it answers to these is only compared."""


STABLE = "stable"
"""Name of the one variant of a route that no rollout is changing."""
SHADOW = "~"
"""First character of the variant on a work item that is a copy: its result is compared and never given to anybody."""


def answering_unit(model: str, variant: str) -> str:
    """The unit whose replicas answer for a variant: what decisions, placements and facts name.

    `variant` as work items and results name it; these name the model whichever variant it is. The stable one is the
    model's own, and so is what names none, as nothing routed it.
    """
    named = variant.removeprefix(SHADOW)
    return model if named in ("", STABLE) else variant_unit(model, named)


PINNED_HEADER = "sie-pinned"
"""Of a work record, and of the result: its variant was chosen by content or by version, not by its key."""
PINNED: Headers = ((PINNED_HEADER, b"1"),)


def pinned_in(headers: Headers) -> Headers:
    """What of these headers a stage before the result passes on."""
    return PINNED if headers and header(headers, PINNED_HEADER) is not None else ()


class VariantRule(Struct, frozen=True):
    """Requests with this content go to one variant, whatever their key."""

    source: Literal["header", "field", "tenant"]
    name: str
    """Of the header, or of the field of `inputs`; of a tenant: nothing."""
    equals: str
    variant: str


class GoldenRequest(Struct, frozen=True):
    """A request whose answer is known. `inputs` and `outputs` are JSON objects; fields not in `outputs` are free."""

    inputs: str
    outputs: str
    tolerance: float = 0.0
    """Largest difference of a number."""
