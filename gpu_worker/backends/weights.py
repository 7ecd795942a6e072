"""The identity of a model's weights: one digest over the files that decide its answers.

The build writes the digest into the declaration, the scheduler puts it on the launch, the backend compares it with what
lies on the disk before it loads anything, and every result carries it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from gpu_worker.backends.base import ModelRefused

WEIGHT_SUFFIXES = (".safetensors", ".skops", ".onnx", ".gguf")
NETWORK_FILES = ("config.json", "generation_config.json")
"""Shapes and constants of a network, and the tokens that end its answers: the same tensors under another config are
another model."""
ADAPTER_CONFIG = "adapter_config.json"
"""Of a LoRA adapter: its scale and where it acts."""


def local_source(source: str, field: str = "source.uri") -> Path:
    """Where `launch.source` lies on this machine. field: where that is declared. Raises ModelRefused for a scheme that
    no worker fetches from.
    """
    scheme, separator, _ = source.partition("://")
    if separator and scheme != "file":
        raise ModelRefused(
            "source_not_fetched",
            f"{field}: {source}: weights are not fetched from {scheme}:// yet. Copy them to a folder that every "
            "worker sees, and declare its path or file:// URI.",
        )
    return Path(source.removeprefix("file://"))


def weight_files(source: Path) -> list[Path]:
    """The files the digest covers, in the order it covers them. A single file stands for itself."""
    if source.is_file():
        return [source]
    found = [
        file
        for file in source.rglob("*")
        if file.is_file() and (file.suffix in WEIGHT_SUFFIXES or file.name in (*NETWORK_FILES, ADAPTER_CONFIG))
    ]
    return sorted(found, key=lambda file: file.relative_to(source).as_posix())


def weights_digest(source: Path) -> str:
    """`sha256:...` over name, size and content of every weight file. Raises ModelRefused when there is none.

    A single file is digested under its bare name, so a folder with only that weight file has the same digest.
    """
    files = weight_files(source)
    if not files:
        raise ModelRefused(
            "weights_missing",
            f"no weights at {source}: expected a file ending in {', '.join(WEIGHT_SUFFIXES)}. Correct source.uri in "
            "the declaration; `make models` builds the models of this repository.",
        )
    root = source if source.is_dir() else source.parent
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256")
        total.update(f"{file.relative_to(root).as_posix()}\n{file.stat().st_size}\n{content.hexdigest()}\n".encode())
    return f"sha256:{total.hexdigest()}"


def verified_digest(source: Path, expected: str) -> str:
    """The digest of the weights at `source`. Raises ModelRefused when it is not `expected` (empty: anything goes)."""
    found = weights_digest(source)
    if expected and found != expected:
        raise ModelRefused(
            "weights_digest_mismatch",
            f"the weights at {source} are not the declared ones: declared {expected}, found {found}. Restore the "
            "files, or apply the declaration that belongs to them.",
        )
    return found


def only_file(source: Path, suffix: str) -> Path:
    """The one file ending in `suffix` at `source` (a folder or the file). Raises ModelRefused for none or several."""
    files = [source] if source.is_file() else sorted(source.glob(f"*{suffix}"))
    matching = [file for file in files if file.suffix == suffix]
    if len(matching) != 1:
        names = ", ".join(file.name for file in files) or "nothing"
        raise ModelRefused("weights_missing", f"expected exactly one *{suffix} at {source}, found {names}.")
    return matching[0]


def whole_number(config: Mapping[str, object], key: str, default: int) -> int:
    """A non-negative integer from a model's config. Raises ModelRefused."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelRefused("invalid_model_config", f"backend.config.{key}: {value!r} is not a whole number >= 0.")
    return value
