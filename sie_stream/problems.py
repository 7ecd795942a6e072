"""What is wrong with a declaration, said so that the reader can mend it without looking anything up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from sie_stream.errors import ConfigError, nearest

VALUE_CHARS_MAX = 60


class Problem(msgspec.Struct, frozen=True):
    """One thing wrong in one place.

    `path` is spelt as the document spells it (`spec.slas.p99LatencyMs`, `baselines[1].latency_ms`); `value` is what
    stands there, shortened; `allowed` lists what may stand there, when that is a list; `nearest` is the allowed
    spelling closest to `value`; `where` names the file and the document in it.
    """

    path: str
    value: str
    message: str
    allowed: tuple[str, ...] = ()
    nearest: str | None = None
    where: str = ""

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.where, self.path) if part)
        text = f"{place}: {self.message}"
        if self.allowed:
            text += f" Allowed: {', '.join(self.allowed)}."
        if self.nearest is not None:
            text += f" Did you mean {self.nearest!r}?"
        return text


class SpecError(ConfigError):
    """A declaration or a schema is wrong; `problems` holds everything found, in the order of the document."""

    code = "invalid_spec"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"invalid declaration, {count}:", *(f"  {problem}" for problem in self.problems)]))


def shown(value: object) -> str:
    """A value as a message shows it: Python's repr, at most 60 characters."""
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > 4 * VALUE_CHARS_MAX:
        size = len(value)
        value = value[:VALUE_CHARS_MAX] if isinstance(value, str | bytes | list | tuple) else f"object of {size} fields"
    text = repr(value)
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 3] + "..."


def closest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed spelling nearest to `word`; case, `_`, `-` and camelCase do not count as differences."""
    folded = {_fold(option): option for option in allowed}
    guess = nearest(_fold(word), folded)
    return None if guess is None else folded[guess]


def _fold(word: str) -> str:
    return word.replace("_", "").replace("-", "").replace(" ", "").casefold()


def wrong_choice(path: str, value: object, allowed: Iterable[str], what: str) -> Problem:
    """`value` is not among `allowed`; `what` names the thing, as in "service type"."""
    options = tuple(allowed)
    guess = closest(str(value), options)
    return Problem(path, shown(value), f"{shown(value)} is not a known {what}.", options, guess)


def unknown_name(path: str, name: str, allowed: Iterable[str], what: str) -> Problem:
    """A key nobody knows. All allowed keys are listed only when none is near: the near one says enough."""
    options = tuple(allowed)
    guess = closest(name, options)
    return Problem(path, shown(name), f"unknown {what} {name!r}.", () if guess else options, guess)
