"""One request of a decoder between admission and its last token."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Run
from dataclasses import dataclass, field

from msgspec import Struct

from gpu_worker.decoding.blocks import Activation

Reusable = Callable[[Run[bytes]], int]
"""(digests of blocks that the pool has) -> how many of the first of them need not be computed."""


def all_blocks(digests: Run[bytes]) -> int:
    return len(digests)


def no_blocks(digests: Run[bytes]) -> int:
    """For a prompt of which every token's logits are asked for."""
    return 0


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, and how far their keys and values are in the pool.

    A sequence with one token to compute decodes; one with more fills its prompt (or, after a preemption, prompt and
    answer).
    """

    ticket: int
    """Names it towards whoever submitted it."""
    ids: list[int]
    """Prompt, then answer."""
    tokens_max: int
    """How long the answer may get."""
    priority: int = 1
    """0 is the most urgent."""
    deadline_at_ms: int | None = None
    """Wall clock."""
    reusable: Reusable = all_blocks
    prompt_tokens: int = field(init=False)
    order: int = 0
    """Of arrival."""
    computed: int = 0
    """Tokens of `ids` whose keys and values are in the blocks."""
    reused: int = 0
    """Tokens of the prompt that did not have to be computed."""
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    """Of the full blocks of `ids`, as far as they were needed."""
    fetched: int = 0
    """Blocks, after those that the pool had, whose content comes from the tier outside the engine."""
    published: int = 0
    """How many of the first blocks need not be published any more."""
    kept: int = 0
    """Tokens whose keys and values wait in host memory while it holds no blocks: they need not be computed again."""
    swapped: int = 0
    """Blocks of the swap space that they take."""
    activation: Activation | None = None
    """Where an activated adapter begins to act; None: nowhere, or the model has none."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.ids)

    @property
    def rank(self) -> tuple[int, int]:
        """Lower runs first."""
        return self.priority, self.order

    @property
    def pending(self) -> int:
        """Tokens to be computed before the next one can be chosen."""
        return len(self.ids) - self.computed

    def acted_on(self, position: int) -> bool:
        """Whether an activated adapter acts on this token."""
        return self.activation is not None and position >= self.activation.start

    @property
    def answer(self) -> list[int]:
        return self.ids[self.prompt_tokens :]


class Chunk(Struct, frozen=True):
    """Tokens [start, start + count) of a sequence run in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def chooses(self) -> bool:
        """Whether the next token is known after this step."""
        return self.end == len(self.sequence.ids)


class Keep(Struct, frozen=True):
    """Copy these blocks of a sequence, its first ones, into host memory: they are overwritten from now on."""

    sequence: Sequence
    blocks: tuple[int, ...]


class Restore(Struct, frozen=True):
    """Copy what was kept of a sequence into its blocks from number `first` on; those before have it already."""

    sequence: Sequence
    first: int
    blocks: tuple[int, ...]


class Fetch(Struct, frozen=True):
    """Copy these blocks of the tier, named by their digests, into these blocks."""

    sequence: Sequence
    blocks: tuple[int, ...]
    digests: tuple[bytes, ...]


Move = Keep | Restore | Fetch
