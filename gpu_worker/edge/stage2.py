"""Stage 2 of fused models: the tokenizer that turns tokens into text, and the check against the output_schema."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from gpu_worker.outcomes import Stage2Refused
from sie_stream.control import ModelLaunch
from sie_stream.edge.tokenizer import TokenizerStore
from sie_stream.errors import ConfigError
from sie_stream.input_schema import compile_schema
from sie_stream.postprocess import Stage2, stage2_of
from sie_stream.problems import SpecError


class Stage2Store:
    """Makes Stage 2 per launch; tokenizers and compiled schemas are shared by content."""

    def __init__(self, record_bytes_max: int) -> None:
        self._record_bytes_max = record_bytes_max
        self._tokenizers = TokenizerStore()
        self._checks: dict[bytes, Callable[[bytes], None] | None] = {}

    def __call__(self, launch: ModelLaunch) -> Stage2:
        """Raises Stage2Refused when the tokenizer cannot be read or the schema cannot be compiled."""
        try:
            # A pooled model's tokens become text in egress; reading a tokenizer would hold heartbeats up for nothing.
            here = launch.tokenizer and launch.fusion != "pooled"
            detokenise = self._tokenizers.get(launch.tokenizer).decode if here else None
            return stage2_of(self._record_bytes_max, detokenise, self._check(bytes(launch.output_schema)))
        except (ConfigError, SpecError) as refusal:
            raise Stage2Refused(str(refusal)) from refusal

    def _check(self, schema: bytes) -> Callable[[bytes], None] | None:
        if schema not in self._checks:
            parsed = msgspec.json.decode(schema, type=dict[str, object])
            self._checks[schema] = compile_schema(parsed).check if parsed.get("properties") else None
        return self._checks[schema]
