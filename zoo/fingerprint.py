"""What a built model depends on, as one digest: its recipe, the code that builds it, its pins, and library versions.

Imports nothing that is slow: this runs for every model each time, also when there is nothing to build.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from gpu_worker.backends.weights import NETWORK_FILES
from zoo.recipes import Recipe
from zoo.weights import pins

ZOO = Path(__file__).parent
CLASSICAL = ("numpy", "scikit-learn", "skops", "skl2onnx", "onnx", "onnxruntime")
PRETRAINED = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf", "onnxruntime", "scikit-learn")
DATA_ONLY = frozenset({"recipes"})
"""Modules whose content reaches the fingerprint as data."""


class Built(msgspec.Struct, frozen=True):
    """build.json of a finished model folder."""

    fingerprint: str
    took_s: float
    files: dict[str, int]
    """name -> size in bytes"""


def fingerprint(recipe: Recipe) -> str:
    """Digest of everything that decides the content of a model folder, except the backends that answer for it: of
    those only counts which files beside the weights the declared digest covers."""
    pinned = pins()
    parts = {
        "recipe": msgspec.structs.replace(recipe, cost=0),
        "code": code_digest(recipe.builder),
        "weights": [pinned[name] for name in recipe.weights],
        "libraries": library_versions(CLASSICAL if recipe.builder == "classical" else PRETRAINED),
        "machine": platform.machine(),
    }
    if recipe.builder != "classical":
        parts["digested"] = NETWORK_FILES  # another rule gives another digest in the declaration
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()


@functools.cache
def library_versions(names: tuple[str, ...]) -> dict[str, str]:
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


@functools.cache
def code_digest(builder: str) -> str:
    """Digest of the builder module and of what it imports from zoo/. Comments and layout do not count."""
    total = hashlib.sha256()
    for name in sorted(_closure(builder) - DATA_ONLY):
        total.update(f"{name}\n{ast.dump(_tree(name))}\n".encode())
    return total.hexdigest()


def _closure(builder: str) -> set[str]:
    found: set[str] = set()
    waiting = [builder]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imports(name)
    return found


@functools.cache
def _tree(name: str) -> ast.Module:
    return ast.parse((ZOO / f"{name}.py").read_text())


@functools.cache
def _imports(name: str) -> tuple[str, ...]:
    """Modules of zoo/ that a module of zoo/ imports."""
    found: list[str] = []
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.ImportFrom) and node.module == "zoo":
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zoo."):
            found.append(str(node.module).removeprefix("zoo."))
    return tuple(found)


def is_current(folder: Path, wanted: str) -> bool:
    """Whether `folder` holds a finished build with that fingerprint, all files present in their full size."""
    try:
        built = msgspec.json.decode((folder / "build.json").read_bytes(), type=Built)
        return built.fingerprint == wanted and built.files == sizes(folder)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return False


def sizes(folder: Path) -> dict[str, int]:
    """Files of a model folder, without build.json itself."""
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != "build.json"}
