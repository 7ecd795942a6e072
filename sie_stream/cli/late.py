"""Commands whose module is imported only once they are asked for.

All of the command line together imports the scheduler, Arrow and a solver: a second of CPU before the first line of
`sie-stream trace` runs. After "Lazily Loading Subcommands" in the documentation of Click, which Typer is made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_group

from sie_stream.cli.leaving import leaving_at_once


class Late(NamedTuple):
    """Where a command is, as `module:attribute` (a function, or a Typer of its own), and its line in the list."""

    place: str
    summary: str


class LateGroup(TyperGroup):
    """A group of the commands in `late`, in that order. Lists them without importing any."""

    late: ClassVar[Mapping[str, Late]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands(self.late)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.late)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """As every group does it, with the summaries instead of the commands."""
        limit = formatter.width - 6 - max(map(len, self.late))
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, TyperCommand(name, help=late.summary).get_short_help_str(limit))
                    for name, late in self.late.items()
                ]
            )


class _Commands(MutableMapping[str, Any]):
    """Imports a command when it is taken out; its name is known before."""

    def __init__(self, late: Mapping[str, Late]) -> None:
        self._late = dict(late)
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = loaded(name, self._late[name])
        return made

    def __setitem__(self, name: str, made: Any) -> None:
        self._made[name] = made

    def __delitem__(self, name: str) -> None:
        del self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._late, *self._made)))

    def __len__(self) -> int:
        return len({*self._late, *self._made})


class OnceCommand(TyperCommand):
    """Refuses an option that is given twice where the last one alone would count: the first asked for something."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        counts = Counter(order)
        for param, count in counts.items():
            if count < 2 or not isinstance(param, TyperOption) or ctx.resilient_parsing:
                continue
            if not (param.multiple or param.count or param.is_flag):
                ctx.fail(f"{'/'.join(param.opts)} is given {count} times, and takes one value.")
        return super().parse_args(ctx, args)


def _once(app: typer.Typer) -> None:
    """For every command of a Typer."""
    for command in app.registered_commands:
        command.cls = OnceCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _once(group.typer_instance)


def loaded(name: str, late: Late) -> Any:
    """The command as Typer would have made it at once."""
    with leaving_at_once():
        found = resolve_name(late.place)
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name)(found)
    _once(alone)
    return get_group(alone).commands[name]
