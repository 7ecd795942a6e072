"""The project's source as the architecture tests see it: files, imports, functions. Reads, never imports."""

from __future__ import annotations

import ast
import functools
import gc
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sie_stream", "topics", "schemas", "processors", "scheduler", "gpu_worker", "zoo")
EDGE_FOLDERS = frozenset({"edge", "sim", "cli", "client", "gateway", "zoo", "backends", "tests"})
EDGE_FILES = frozenset({"main.py", "__main__.py"})

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    in_function: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def third_party(self) -> bool:
        return self.top not in sys.stdlib_module_names and self.top not in (*PACKAGES, "tests")


@dataclass(frozen=True)
class SourceFile:
    """One Python file; `name` is its path from the root, with slashes."""

    name: str
    text: str
    tree: ast.Module

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.name.split("/"))

    @property
    def package(self) -> str:
        return self.parts[0]

    @property
    def pure(self) -> bool:
        """Touches nothing of the world: not an edge folder, not a main."""
        return not (EDGE_FOLDERS & set(self.parts[:-1])) and self.parts[-1] not in EDGE_FILES

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Walked once, because a dozen rules look at every node of every file."""
        return tuple(ast.walk(self.tree))

    @functools.cached_property
    def imports(self) -> tuple[Import, ...]:
        found = [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        spans = [(function.lineno, function.end_lineno or 0) for function in self.functions]
        return tuple(
            Import(module, node.lineno, any(first <= node.lineno <= last for first, last in spans))
            for node in found
            for module in imported(node)
        )

    @functools.cached_property
    def functions(self) -> tuple[FunctionNode, ...]:
        return tuple(node for node in self.nodes if isinstance(node, FunctionNode))

    @functools.cached_property
    def calls(self) -> tuple[tuple[str, ast.Call], ...]:
        """Every call with its dotted name: `open`, `time.sleep`; computed callees have none and are left out."""
        found = ((dotted(node.func), node) for node in self.nodes if isinstance(node, ast.Call))
        return tuple((name, node) for name, node in found if name)


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Full names: `from sie_stream.edge import broker` gives sie_stream.edge.broker."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = "." * node.level + (node.module or "")
    return [f"{base}.{alias.name}" for alias in node.names]


def parse(name: str, text: str) -> SourceFile:
    return SourceFile(name, text, ast.parse(text, filename=name))


@functools.cache
def project_files() -> tuple[SourceFile, ...]:
    return _read(PACKAGES)


@functools.cache
def files_of_tests() -> tuple[SourceFile, ...]:
    return _read(("tests",))


def _read(folders: tuple[str, ...]) -> tuple[SourceFile, ...]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    gc.disable()  # it would go through all trees again and again while they grow, which takes five times the parsing
    try:
        return tuple(parse(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths)
    finally:
        gc.freeze()  # they stay to the end
        gc.enable()


@functools.cache
def tracked_texts() -> dict[str, str]:
    """Every file that git tracks and that is text: path to content."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts: dict[str, str] = {}
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if not path.is_file():  # removed in the working tree
            continue
        try:
            texts[name] = path.read_text()
        except UnicodeDecodeError:
            continue
    return texts


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""
