"""Stage 0: text to token ids, shared by all models with the same tokenizer, with a cache that is exact.

A text cut at an arbitrary place does not tokenise to the joined pieces, so prefixes are cached only where the
tokenizer itself cuts: at its special tokens (`<|im_end|>` and the like), which it takes out before anything else. The
pieces between them are tokenised one by one, so the system prompt and the earlier turns of a chat are found in the
cache and only the new turn costs anything. A tokenizer that cannot promise this (`TextEncoder.separators` is empty) has
whole texts cached. A property test holds cached and plain results equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from sie_stream.errors import InvalidRequest

CHARS_PER_TOKEN_MAX = 256
"""More than one token of any text stands for, on average."""
TOKENS_MAX = 500_000
"""Token ids the cache holds; about 20 MB when full."""
ENTRY_TOKENS = 8
"""What an entry is charged besides its ids."""


class ChatMessage(Struct, frozen=True):
    role: str
    content: str


class TextEncoder(Protocol):
    """One tokenizer. Implemented by sie_stream.edge.tokenizer."""

    @property
    def digest(self) -> str: ...

    @property
    def separators(self) -> Mapping[str, int]:
        """Tokens the text may be cut at without changing any other token: {text: id}. Empty: none is safe."""
        ...

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the model expects around a text ([CLS], <s> ...)."""
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Without added special tokens; those that stand in the text count as such."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """By the chat template, ending where the assistant speaks. Raises InvalidRequest (`bad_messages`)."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        ...


class CacheCounts(Struct):
    """Counters since the start."""

    hits: int = 0
    misses: int = 0
    tokens_reused: int = 0
    tokens_made: int = 0


class TokenCache:
    """Least recently used pieces of text and their ids, for all tokenizers of the process."""

    def __init__(self, tokens_max: int = TOKENS_MAX) -> None:
        self.counts = CacheCounts()
        self._tokens_max = tokens_max
        self._held = 0
        self._entries: dict[tuple[str, str, str], tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: tuple[str, str, str]) -> tuple[int, ...] | None:
        found = self._entries.pop(key, None)
        if found is None:
            self.counts.misses += 1
            return None
        self._entries[key] = found  # now the newest of the dictionary
        self.counts.hits += 1
        self.counts.tokens_reused += len(found)
        return found

    def put(self, key: tuple[str, str, str], ids: tuple[int, ...]) -> None:
        self.counts.tokens_made += len(ids)
        cost = _cost(key, ids)
        if cost > self._tokens_max // 4 or key in self._entries:
            return
        self._entries[key] = ids
        self._held += cost
        while self._held > self._tokens_max:
            oldest = next(iter(self._entries))
            self._held -= _cost(oldest, self._entries.pop(oldest))


def _cost(key: tuple[str, str, str], ids: tuple[int, ...]) -> int:
    return len(ids) + len(key[2]) // 4 + ENTRY_TOKENS


class Tokeniser:
    """One tokenizer with the shared cache."""

    def __init__(self, encoder: TextEncoder, cache: TokenCache) -> None:
        self._encoder = encoder
        self._cache = cache
        self._separators = dict(encoder.separators)
        # Longest first: the tokenizer takes the leftmost, longest match as well.
        ordered = sorted(self._separators, key=lambda text: (-len(text), text))
        self._cuts = re.compile("(" + "|".join(map(re.escape, ordered)) + ")") if ordered else None

    def text(self, text: str) -> tuple[int, ...]:
        """Ids of a plain text (`prompt`, `text`)."""
        key = (self._encoder.digest, "text", text)
        ids = self._cache.get(key)
        if ids is None:
            ids = tuple(self._encoder.encode(text))
            self._cache.put(key, ids)
        return ids

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Ids of a chat. Raises InvalidRequest (`bad_messages`) when the template refuses it."""
        return self.rendered(self._encoder.render_chat(messages))

    def rendered(self, text: str) -> tuple[int, ...]:
        """Ids of a rendered chat: no special tokens are added, those in the text count as such."""
        if self._cuts is None:
            return self._plain(text)
        ids: list[int] = []
        separators = self._separators
        for place, piece in enumerate(self._cuts.split(text)):
            if place % 2:
                ids.append(separators[piece])
            elif piece:
                ids.extend(self._plain(piece))
        return tuple(ids)

    def _plain(self, piece: str) -> tuple[int, ...]:
        key = (self._encoder.digest, "plain", piece)
        ids = self._cache.get(key)
        if ids is None:
            ids = tuple(self._encoder.encode_plain(piece))
            self._cache.put(key, ids)
        return ids


class TextInputs(Struct, frozen=True, gc=False):
    """The part of `inputs` that Stage 0 reads; the input_schema has already been held against the whole."""

    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    text: str | tuple[str, ...] | None = None


def text_tokens(tokeniser: Tokeniser, inputs: TextInputs) -> tuple[int, ...] | None:
    """Ids of the one text there is, or None when there is none (a list of texts is left to the engine)."""
    if inputs.messages is not None:
        return tokeniser.chat([{"role": message.role, "content": message.content} for message in inputs.messages])
    if inputs.prompt is not None:
        return tokeniser.text(inputs.prompt)
    if isinstance(inputs.text, str):
        return tokeniser.text(inputs.text)
    return None


def check_context(token_ids: tuple[int, ...], tokens_max: int, generates: bool, field: str) -> None:
    """Raises InvalidRequest (`context_too_long`) when the prompt leaves no room in the model's context.

    A generative model needs room for at least one new token. `tokens_max` 0: not limited.
    """
    allowed = tokens_max - 1 if generates else tokens_max
    if tokens_max and len(token_ids) > allowed:
        raise InvalidRequest(
            "context_too_long",
            f"the text has {len(token_ids)} tokens, allowed are {allowed} (context {tokens_max}). Shorten it.",
            field,
        )


def check_length(inputs: TextInputs, tokens_max: int, field: str) -> None:
    """Refuses what cannot fit before it is tokenised: 8 MiB behind a reference take seconds, and all requests wait.

    Not for models whose tokenizers cut long texts: these always fit.

    Raises InvalidRequest (`context_too_long`). `tokens_max` 0: not limited.
    """
    if inputs.messages is not None:
        size = sum(len(message.content) for message in inputs.messages)
    else:
        text = inputs.text if inputs.prompt is None else inputs.prompt
        size = len(text) if isinstance(text, str) else 0
    if tokens_max and size > tokens_max * CHARS_PER_TOKEN_MAX:
        raise InvalidRequest(
            "context_too_long",
            f"the text has {size} characters, which cannot be {tokens_max} tokens (the model's context). Shorten it.",
            field,
        )
