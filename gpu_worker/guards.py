"""What protects the fields of each model on this worker, and which records may hold such fields."""

from __future__ import annotations

from collections.abc import Sequence

from sie_stream.control import ModelLaunch
from sie_stream.errors import ConfigError
from sie_stream.ids import base_of
from sie_stream.privacy.rules import Rules, rules_of
from sie_stream.privacy.vault import Guard, Vault
from sie_stream.problems import SpecError


class Guards:
    """`vault`: None where there is no key ring."""

    def __init__(self, vault: Vault | None) -> None:
        self._vault = vault
        self._rules: dict[tuple[bytes, bytes, str], Rules | None] = {}

    def guard_of(self, launch: ModelLaunch) -> Guard | None:
        """None: nothing is to be protected. Raises ConfigError (a SpecError for a schema that cannot be compiled) where
        values would be written in plain: without a key ring, or for others to finish."""
        rules = self._rules_of(launch)
        if rules is None:
            return None
        if rules.outputs and launch.fusion == "pooled":
            fields = ", ".join(sorted(rules.outputs))
            raise ConfigError(
                f"fusion = pooled: outputs {fields} are to be protected, and pooled writes them in plain; allowed are "
                "auto and fused"
            )
        if self._vault is None:
            fields = ", ".join(sorted({*rules.inputs, *rules.outputs}))
            raise ConfigError(
                f"fields {fields} are to be protected, and this worker has no key ring: make one with `sie-stream keys "
                "create --ring DIR`, set SIE_STREAM_PII_KEYS=DIR (setting pii_keys) and start the worker again"
            )
        # Results of every variant name the model, and that is where their readers look for what a value is bound to.
        return Guard(base_of(launch.model), rules, self._vault)

    def may_hold_protected(self, launches: Sequence[ModelLaunch]) -> bool:
        """Of a record on the work topic of these versions. Where none is known, nobody can say."""
        try:
            return not launches or any(self._rules_of(launch) is not None for launch in launches)
        except SpecError:
            return True

    def _rules_of(self, launch: ModelLaunch) -> Rules | None:
        """Raises SpecError."""
        key = bytes(launch.input_schema), bytes(launch.output_schema), launch.privacy_subject
        if key not in self._rules:
            self._rules[key] = rules_of(*key)
        return self._rules[key]
