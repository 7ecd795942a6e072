"""Answers in a declared form: which tokens may come next, by llguidance.

A grammar is compiled once per digest and copied for every request. The library is Rust and keeps its own tables of
the vocabulary; they are built with the first request that asks for a form.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from gpu_worker.backends.base import FORM_ENDED, INVALID_FORM
from gpu_worker.decoding.parameters import JsonSchemaFormat, RegexFormat, ResponseFormat

COMPILED_MAX = 64
"""Grammars that are kept, the ones used last; a large one has some MB."""
SCHEMA_BYTES_MAX = 64 * 1024
MESSAGE_CHARS_MAX = 500


class GrammarRefused(Exception):
    """A form that cannot be followed.

    code: invalid_response_format; response_format_unsupported with the model's kind of tokenizer (llguidance reads
    byte-level and byte-fallback ones); grammar_failed in the middle of an answer.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = " ".join(message.split())[:MESSAGE_CHARS_MAX]


class Grammar:
    """Where one answer stands in its form."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, never: Sequence[int]) -> None:
        """never: tokens that llguidance takes for the end, though they are not."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._never = never

    def allowed(self, logits: Tensor) -> Tensor:
        """(vocabulary,) logits in which only tokens that keep to the form can be chosen. A copy.

        Raises GrammarRefused.
        """
        bits = self._matcher.compute_bitmask()
        self._check()
        mask = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")[: self._vocabulary]
        refused = torch.ones(logits.shape[0], dtype=torch.bool)
        refused[: len(mask)] = torch.from_numpy(mask == 0)
        for token in self._never:
            refused[token] = True
        return logits.masked_fill(refused.to(logits.device), float("-inf"))

    def complete_after(self, token: int) -> bool:
        """Takes the chosen token; whether nothing more can follow. Raises GrammarRefused."""
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def resume(self, answer: Sequence[int]) -> None:
        """Take the tokens that were chosen elsewhere, where the same answer began. Raises GrammarRefused."""
        for token in answer:
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            said = self._matcher.get_error().partition("<state>")[0]  # then follows its inner state
            raise GrammarRefused(
                FORM_ENDED, f"parameters.response_format: no answer of this model goes on in this form: {said}"
            )


class Grammars:
    """Of one model. Used from the thread that serves.

    tokenizer:  tokenizer.json as text
    vocabulary: rows of the network's output
    stops:      tokens that end an answer; allowed where the form is complete
    """

    def __init__(self, tokenizer: str, vocabulary: int, stops: Sequence[int]) -> None:
        self._source = tokenizer
        self._vocabulary = vocabulary
        self._stops = list(stops)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self.compilations = 0

    def begin(self, form: ResponseFormat) -> Grammar:
        """An answer's start. Raises GrammarRefused for a form that is malformed, or that the library cannot follow."""
        digest = hashlib.blake2b(msgspec.msgpack.encode(form_key(form)), digest_size=16).digest()
        matcher = self._compiled.get(digest)
        if matcher is None:
            matcher = self._compiled[digest] = self._compile(form)
            if len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(digest)
        # A model without stop tokens ends where nothing more can follow; the library would make one up.
        never = [] if self._stops else self._vocabulary_tables().eos_tokens
        return Grammar(matcher.deep_copy(), self._vocabulary, never)

    def _compile(self, form: ResponseFormat) -> LLMatcher:
        self.compilations += 1
        try:
            grammar = grammar_of(form)
            matcher = LLMatcher(self._vocabulary_tables(), grammar, log_level=0)
        except ValueError as error:
            raise GrammarRefused(INVALID_FORM, str(error)) from error
        if matcher.is_error():
            raise GrammarRefused(INVALID_FORM, matcher.get_error())
        return matcher

    def _vocabulary_tables(self) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = LLTokenizer(self._source, eos_token=self._stops or None)
            except ValueError as error:
                message = f"llguidance cannot read the model's tokenizer: {error}"
                raise GrammarRefused("response_format_unsupported", message) from error
        return self._tokenizer


def form_key(form: ResponseFormat) -> tuple[str, str]:
    """What two equal forms have in common."""
    if isinstance(form, RegexFormat):
        return "regex", form.pattern
    return "json_schema", bytes(form.schema).decode()


def grammar_of(form: ResponseFormat) -> str:
    """The form as llguidance reads it. Raises GrammarRefused for a schema that is too long, ValueError for no JSON."""
    if isinstance(form, JsonSchemaFormat):
        text = bytes(form.schema).decode()
        if len(text) > SCHEMA_BYTES_MAX:
            message = f"the schema has {len(text)} characters, allowed are {SCHEMA_BYTES_MAX}."
            raise GrammarRefused(INVALID_FORM, message)
        if not text.lstrip().startswith("{"):
            raise GrammarRefused(INVALID_FORM, "the schema must be a JSON object.")
        # Compact: a small model that may write blanks between two items may never stop writing them.
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    return LLMatcher.grammar_from_regex(form.pattern)
