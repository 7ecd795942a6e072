"""Content rules of a route: which requests go to one variant whatever their key. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sie_stream.control import VariantRow
from sie_stream.records import Headers, header
from sie_stream.rollout_records import VariantRule


class Content(NamedTuple):
    """What rules look at. `inputs`: a JSON object."""

    headers: Headers
    tenant: str | None
    inputs: bytes


class Selector:
    """The rules of one route, ready for requests."""

    def __init__(self, rules: Sequence[VariantRule], variants: Sequence[VariantRow]) -> None:
        known = {variant.variant: variant for variant in variants}
        self._rules = [(rule, known[rule.variant]) for rule in rules if rule.variant in known]
        self._fields = any(rule.source == "field" for rule, _ in self._rules)
        self._decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def pinned(self, content: Content) -> VariantRow | None:
        """The variant of the first rule that fits; None: the key decides."""
        fields = self._inputs(content.inputs) if self._fields else {}
        for rule, variant in self._rules:
            if self._value(rule, content, fields) == rule.equals:
                return variant
        return None

    def _inputs(self, inputs: bytes) -> dict[str, msgspec.Raw]:
        try:
            return self._decoder.decode(inputs)
        except (msgspec.MsgspecError, RecursionError):
            return {}  # what is wrong with it is said when the inputs are held against the schema

    def _value(self, rule: VariantRule, content: Content, fields: dict[str, msgspec.Raw]) -> str | None:
        """As text; JSON strings without their quotes, everything else as JSON writes it."""
        match rule.source:
            case "tenant":
                return content.tenant
            case "header":
                found = header(content.headers, rule.name)
                return None if found is None else found.decode("utf-8", "replace")
            case "field":
                raw = fields.get(rule.name)
                if raw is None:
                    return None
                text = bytes(raw).strip()
                return msgspec.json.decode(text, type=str) if text.startswith(b'"') else text.decode("utf-8", "replace")
