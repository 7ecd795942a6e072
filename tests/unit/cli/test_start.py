"""The command line starts quickly: its list of commands imports none, and a command imports only what it needs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from pkgutil import resolve_name

import pytest
import typer
from typer.testing import CliRunner

from sie_stream.cli import audit, main
from sie_stream.cli.late import Late

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
HEAVY = ("cryptography", "numpy", "ortools", "pyarrow", "sklearn", "torch")
SCRIPT = EntryPoint("sie-stream", tomllib.loads(PYPROJECT.read_text())["project"]["scripts"]["sie-stream"], "")
LATE = {**main.COMMANDS, **{f"audit {name}": late for name, late in audit.COMMANDS.items()}}


def imported(module: str) -> set[str]:
    """The heavy libraries that a fresh interpreter holds after importing the module."""
    code = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("main", set()),
        ("trace", set()),
        ("stream", set()),
        ("decisions", set()),
        ("audit_requests", set()),
        ("models", {"ortools"}),  # it folds the control log, as the scheduler does
        ("replay", {"ortools", "cryptography"}),  # it opens protected answers
    ],
)
def test_a_command_imports_no_heavy_library_that_it_does_not_need(module: str, needs: set[str]) -> None:
    assert imported(f"sie_stream.cli.{module}") <= needs


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from sie_stream.cli.main import app, COMMANDS\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print(*(late.place for late in COMMANDS.values() if late.place.partition(':')[0] in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_a_line_of_the_list_is_what_the_command_says_of_itself(late: Late) -> None:
    found = resolve_name(late.place)
    told = found.info.help if isinstance(found, typer.Typer) else inspect.getdoc(found)
    assert told is not None
    assert late.summary == " ".join(told.split("\n\n")[0].split())


@pytest.mark.parametrize("name", LATE)
def test_every_command_has_its_help(name: str) -> None:
    shown = CliRunner().invoke(main.app, [*name.split(), "--help"])
    assert shown.exit_code == 0
    assert shown.stdout.startswith("Usage: ")
    assert "Examples:" in shown.stdout


def test_ctrl_c_while_a_command_is_imported_ends_it_quietly(tmp_path: Path) -> None:
    """As libraries in C do, the module turns the interrupt into an error of its own."""
    (tmp_path / "heavy.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    sum(range(1000))\n"
        "except BaseException as error:\n    raise ImportError('cannot be imported') from error\n"
    )
    code = "from sie_stream.cli import main; main.COMMANDS['top'] = main.Late('heavy:top', 'x'); main.main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", code, "top"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_before_the_list_of_commands_is_there_ends_it_quietly(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsum(range(1000))\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", f"from {SCRIPT.module} import main; main()", "top"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_nothing_is_imported_before_ctrl_c_is_quiet() -> None:
    """What a fresh interpreter does not hold yet is some milliseconds in which Ctrl-C shows a traceback."""
    code = f"import sys; before = set(sys.modules); import {SCRIPT.module}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = {name for name in done.stdout.split() if not name.startswith("importlib")} - {"_warnings", "warnings"}
    assert new == {"sie_stream", "sie_stream.cli", SCRIPT.module}


def test_a_misspelt_command_is_told_the_nearest() -> None:
    shown = CliRunner().invoke(main.app, ["trcae"])
    assert shown.exit_code == 2
    assert "Did you mean 'trace'?" in shown.output
