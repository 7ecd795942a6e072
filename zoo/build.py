"""Builds the zoo: `python -m zoo.build [--out .models] [--only PATTERN] [--jobs N]`.

Each model is built in a process of its own kind, into a scratch folder that takes the place of the old one when it is
complete. A model whose fingerprint has not changed is left alone, so a second run ends at once.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sie_stream.edge.file_lock import locked
from zoo.fingerprint import Built, fingerprint, is_current, sizes
from zoo.recipes import Recipe, catalogue, matching

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
INTERRUPTED = 130
EVERY = 10
"""In a pipe, progress is told at least at each so many models."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 built or nothing to do, 1 some model failed, 2 wrong use, 130 interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the processes of the pool end as well
    options = _parser().parse_args(arguments)
    console = Console(soft_wrap=True)
    recipes = catalogue()
    if options.only:
        recipes = matching(recipes, options.only)
        if not recipes:
            console.print(f"--only: no model matches {options.only!r}. `python -m zoo.build --list` shows the names.")
            return 2
    if options.list:
        console.print("\n".join(recipe.name for recipe in recipes))
        return 0
    out = Path(options.out)
    # A second build waits, then finds everything done.
    with locked(out / ".lock", f"building models into {out}", lambda text: console.print(text, highlight=False)):
        if not options.only:
            remove_strangers(out, {recipe.name for recipe in recipes}, console)
        waiting = [
            (recipe, wanted)
            for recipe in recipes
            if not is_current(out / recipe.name, wanted := fingerprint(recipe)) or options.fresh
        ]
        if not waiting:
            console.print(f"{len(recipes)} models in {out} are up to date.")
            return 0
        return build_all(waiting, out, options.jobs, console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zoo.build", description="Build the models of the zoo.")
    parser.add_argument("--out", default=".models", metavar="DIR", help="folder to build into (default: .models)")
    parser.add_argument("--only", metavar="PATTERN", help="only models whose name matches, e.g. 'iris-*' or mlp")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: cores)")
    parser.add_argument("--fresh", action="store_true", help="build also what is up to date")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    return parser


def build_all(waiting: list[tuple[Recipe, str]], out: Path, jobs: int, console: Console) -> int:
    """Build, showing progress. One failure does not stop the others."""
    started = time.monotonic()
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))  # the processes are the parallelism
    failures: dict[str, str] = {}
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("building models", total=len(waiting))
        news = News(Counter(group_of(recipe) for recipe, _ in waiting))
        if not console.is_terminal:
            console.print(f"building {len(waiting)} models into {out}, {jobs} at a time, those that take longest first")

        def done(recipe: Recipe, error: BaseException | None) -> None:
            if error is not None:
                failures[recipe.name] = f"{type(error).__name__}: {error}"
                progress.console.print(f"[red]failed[/red] {recipe.name}: {failures[recipe.name]}")
            progress.update(bar, advance=1, description=recipe.name)
            line = news.of(group_of(recipe))
            if line and not console.is_terminal:
                console.print(f"{line} ({time.monotonic() - started:.0f} s)", highlight=False)

        try:
            # Apart, since skops looks through every imported module, and transformers cannot bear that.
            for pretrained in (True, False):
                build_group([pair for pair in waiting if bool(pair[0].weights) is pretrained], out, jobs, done)
        except KeyboardInterrupt:
            progress.console.print("interrupted; finished models are kept.")
            return INTERRUPTED
    shutil.rmtree(out / ".building", ignore_errors=True)
    console.print(_summary(waiting, failures, out, time.monotonic() - started))
    return 1 if failures else 0


def group_of(recipe: Recipe) -> str:
    """What its models have in common, for people."""
    return recipe.dataset or "pretrained"


class News:
    """Lines for a build that nobody sees bars of: one for each group that is done, and one for every tenth model.

    `groups`: how many models of each are to be built.
    """

    def __init__(self, groups: Mapping[str, int]) -> None:
        self._left = dict(groups)
        self._total = sum(groups.values())
        self._done = 0

    def of(self, group: str) -> str:
        """What to say of one more model of that group; empty: nothing."""
        self._done += 1
        self._left[group] -= 1
        so_far = f"{self._done} of {self._total} models"
        if not self._left[group]:
            return f"{so_far}: {group} is done"
        return so_far if self._done % EVERY == 0 else ""


def build_group(
    waiting: list[tuple[Recipe, str]], out: Path, jobs: int, done: Callable[[Recipe, BaseException | None], None]
) -> None:
    """Builds models in one pool of processes, the longest first. `done` hears of each."""
    if not waiting:
        return
    waiting = sorted(waiting, key=lambda pair: (-pair[0].cost, pair[0].name))
    pool = ProcessPoolExecutor(max(1, min(jobs, len(waiting))), mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(build_one, recipe, wanted, out): recipe for recipe, wanted in waiting}
        for future in as_completed(futures):
            done(futures[future], future.exception())
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def build_one(recipe: Recipe, wanted: str, out: Path) -> float:
    """Runs in a process of the pool. Returns the seconds it took."""
    started = time.monotonic()
    scratch = out / ".building" / recipe.name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    importlib.import_module(f"zoo.{recipe.builder}").build(recipe, scratch)
    took_s = round(time.monotonic() - started, 2)
    (scratch / "build.json").write_bytes(msgspec.json.encode(Built(wanted, took_s, sizes(scratch))))
    final = out / recipe.name
    shutil.rmtree(final, ignore_errors=True)
    scratch.rename(final)
    return took_s


def remove_strangers(out: Path, names: set[str], console: Console) -> None:
    """Removes finished models that have left the catalogue; anything not built here is left alone."""
    for folder in sorted(out.iterdir()):
        if folder.name not in names and (folder / "build.json").exists():
            shutil.rmtree(folder)
            console.print(f"removed {folder.name}: it is no longer in the catalogue.")


def _summary(waiting: list[tuple[Recipe, str]], failures: dict[str, str], out: Path, took_s: float) -> Table:
    built = [recipe for recipe, _ in waiting if recipe.name not in failures]
    table = Table(title=f"{len(built)} models built in {took_s:.1f} s, {len(failures)} failed")
    for heading in ("kind", "form"):
        table.add_column(heading)
    for heading in ("models", "MiB"):
        table.add_column(heading, justify="right")
    counts = Counter((group_of(recipe), recipe.form) for recipe in built)
    for (kind, form), count in sorted(counts.items()):
        folders = [out / recipe.name for recipe in built if (group_of(recipe), recipe.form) == (kind, form)]
        size = sum(size for folder in folders for size in sizes(folder).values())
        table.add_row(kind, form, str(count), f"{size / (1 << 20):.1f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
