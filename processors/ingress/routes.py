"""The route table as ingress uses it: every row compiled once per route epoch, on its first request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec
from msgspec import Raw

from processors.ingress.decode import Bound
from processors.ingress.events import IngressCommand, Subscribe, Unsubscribe
from processors.ingress.rules import Content, Selector
from processors.tokenise import TextEncoder, TokenCache, Tokeniser
from sie_stream.control import RouteRow, VariantRow
from sie_stream.errors import ConfigError, InvalidRequest, did_you_mean
from sie_stream.ids import TopicNames
from sie_stream.input_schema import InputValidator, compile_schema
from sie_stream.routing import SHARES, choose_variant, pinned_variant, spill_of, variant_bucket

GENERATIVE = "text-generation"


class TextEncoders(Protocol):
    """Tokenizers by path and digest. Raises ConfigError when one cannot be had."""

    def get(self, path: str, digest: str = "") -> TextEncoder: ...


class CompiledRoute:
    """One row, ready for requests.

    broken: why no request of this model can be served here (a schema or tokenizer that cannot be loaded), or None.
    only: the variant that takes all traffic, or None where keys must be split.
    protects: inputs are hashed or encrypted wherever they are kept after scoring, or their schema cannot be read.
    plain: nothing but the input_schema has to be looked at.
    spill: how keys are spread where the buckets do not have equal shares.
    """

    __slots__ = (
        "broken",
        "check",
        "generates",
        "only",
        "output_topic",
        "plain",
        "protects",
        "row",
        "salt",
        "selector",
        "shadows",
        "spill",
        "text_field",
        "tokeniser",
    )

    def __init__(self, row: RouteRow, encoders: TextEncoders, cache: TokenCache) -> None:
        self.row = row
        self.salt = row.instance.encode()
        self.spill = spill_of(row.shares, row.width)
        self.generates = row.service_type == GENERATIVE
        self.output_topic = row.output_topic if row.output_topic and not row.output_bootstrap else None
        full = [variant for variant in row.variants if variant.weight >= SHARES]
        self.selector = Selector(row.rules, row.variants) if row.rules else None
        self.shadows = tuple(variant for variant in row.variants if variant.shadow)
        self.only: VariantRow | None = full[0] if full and not self.selector else None
        self.broken: str | None = None
        self.tokeniser: Tokeniser | None = None
        self.check: Callable[[bytes | Raw], None] = _accept
        self.text_field = ""
        self.protects = protects_inputs(row)
        try:
            validator = _validator(row.input_schema)
            self.check = validator.check
            self.text_field = text_field_of(row)
            if row.tokenizer:
                self.tokeniser = Tokeniser(encoders.get(row.tokenizer, row.tokenizer_digest), cache)
        except (ConfigError, msgspec.DecodeError) as error:
            self.broken = str(error)
        self.plain = not (self.broken or self.generates or self.tokeniser or row.quota_per_s)

    def pinned(self, version: str, content: Content) -> VariantRow | None:
        """The variant that answers whatever the key; None: the key decides. Raises InvalidRequest (unknown_version)."""
        if version:
            return pinned_variant(self.row.variants, self.row.model, version)
        return None if self.selector is None else self.selector.pinned(content)

    def by_key(self, sticky: bytes) -> VariantRow:
        """The variant that answers to a key. Raises InvalidRequest (no_variant)."""
        return self.only or choose_variant(self.row.variants, sticky, self.salt)

    def copied_to(self, sticky: bytes, answering: VariantRow) -> Iterator[VariantRow]:
        """Shadow variants that get a copy of a request with this key."""
        bucket = variant_bucket(sticky, self.salt)
        for shadow in self.shadows:
            if bucket < shadow.shadow and shadow.variant != answering.variant:
                yield shadow


def _accept(_raw: bytes | Raw) -> None:
    return None


def text_field_of(row: RouteRow) -> str:
    """The input that plain text goes to. Raises SpecError for a schema that cannot be read."""
    return _validator(row.input_schema).text_field or ("prompt" if row.service_type == GENERATIVE else "text")


def protects_inputs(row: RouteRow) -> bool:
    """A schema that cannot be read may mark fields as well as another."""
    if b'"pii"' not in bytes(row.input_schema):
        return False
    try:
        return bool(_validator(row.input_schema).protected)
    except (ConfigError, msgspec.DecodeError):
        return True


def _validator(schema: Raw) -> InputValidator:
    return compile_schema(msgspec.json.decode(schema, type=dict[str, object]))


class RouteTable:
    """Rows by model and by instance, and which topics are read for whom."""

    def __init__(self, names: TopicNames, encoders: TextEncoders) -> None:
        self.token_cache = TokenCache()
        self.conflicts: tuple[str, ...] = ()
        """Bindings that are ignored, and why; for the log."""
        self._names = names
        self._encoders = encoders
        self._rows: dict[str, RouteRow] = {}
        self._instances: dict[str, str] = {}
        self._compiled: dict[str, CompiledRoute] = {}
        self._protecting: set[str] = set()
        """Models whose inputs are protected."""
        self._bindings: dict[tuple[str, str], str] = {}
        self._subscribed: dict[str, Subscribe] = {}

    def change(self, rows: Iterable[tuple[str, RouteRow | None]]) -> list[IngressCommand]:
        """Apply rows of sie.routes; the answer says which subscriptions follow from them."""
        for name, row in rows:
            self._compiled.pop(name, None)
            self._protecting.discard(name)
            if row is None:
                self._rows.pop(name, None)
            else:
                self._rows[name] = row
                if protects_inputs(row):
                    self._protecting.add(name)
        self._instances = {row.instance: name for name, row in self._rows.items()}
        return self._resubscribe()

    def by_model(self, model: str) -> CompiledRoute | None:
        """The route of a model by its plain name."""
        found = self._compiled.get(model)
        if found is None:
            row = self._rows.get(model)
            if row is None:
                return None
            found = self._compiled[model] = CompiledRoute(row, self._encoders, self.token_cache)
        return found

    def find(self, model: str, instance: str) -> tuple[CompiledRoute, str]:
        """The route, and the version pinned by name@version (else empty). Raises InvalidRequest (`unknown_model`)."""
        if instance:
            found = self.by_model(self._instances.get(instance, ""))
            if found is None:
                raise InvalidRequest(
                    "unknown_model",
                    f"no model has the instance id {instance!r}.{did_you_mean(instance, self._instances)}",
                    "instance",
                )
            return found, ""
        name, _, version = model.partition("@")
        found = self.by_model(name)
        if found is None:
            raise InvalidRequest(
                "unknown_model",
                f"there is no model {name[:256]!r}.{did_you_mean(name[:256], self._rows)} "
                "`sie-stream get models` lists all.",
                "model",
            )
        return found, version

    def bound(self, group: str, topic: str) -> Bound | None:
        """How records of a topic bound to a model are read in this group; None if nothing is bound to it (any more)."""
        model = self._bindings.get((group, topic))
        route = self.by_model(model) if model else None
        if route is None:
            return None
        return Bound(route.row.instance, route.row.input_deserializer, route.text_field)

    def may_hold_protected(self, bound: Bound | None, topic: str) -> bool:
        """Whether a record that nobody can read may hold protected fields. On the common topic it may be for any model;
        for whom one is whose topic is bound no more, nobody knows."""
        if bound is not None:
            return self.find("", bound.instance)[0].protects
        return topic != self._names.requests or bool(self._protecting)

    def is_input(self, topic: str) -> bool:
        """True if requests are read from `topic`: results must not be written there."""
        return any(topic == bound for _, bound in self._bindings)

    def _resubscribe(self) -> list[IngressCommand]:
        wanted: dict[str, list[str]] = {self._names.ingress_group: [self._names.requests]}
        resets: dict[str, str] = {self._names.ingress_group: "earliest"}
        self._bindings = {}
        conflicts = []
        for name, row in sorted(self._rows.items()):
            if not row.input_topic or row.input_bootstrap:
                continue
            group = row.input_group or self._names.ingress_group
            if row.input_topic.startswith(self._names.prefix):
                conflicts.append(f"{name}: input topic {row.input_topic!r} belongs to SIE-Stream itself")
                continue
            taken = self._bindings.setdefault((group, row.input_topic), name)
            if taken != name:
                conflicts.append(f"{name}: group {group!r} already reads {row.input_topic!r} for model {taken!r}")
                continue
            wanted.setdefault(group, []).append(row.input_topic)
            resets.setdefault(group, row.input_offset_reset)
        self.conflicts = tuple(conflicts)
        commands: list[IngressCommand] = [Unsubscribe(group) for group in self._subscribed if group not in wanted]
        now = {group: Subscribe(group, tuple(topics), resets[group]) for group, topics in wanted.items()}
        commands += [one for group, one in now.items() if self._subscribed.get(group) != one]
        self._subscribed = now
        return commands
