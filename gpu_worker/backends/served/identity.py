"""What a result can say about weights that another server holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gpu_worker.backends.base import ModelRefused


def tree_digest(source: Path) -> str:
    """`sha256:...` over every file: in a model repository code and config decide as weights do."""
    files = sorted((file for file in source.rglob("*") if file.is_file()), key=lambda file: file.as_posix())
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256")
        name = file.relative_to(source).as_posix()
        total.update(f"{name}\n{file.stat().st_size}\n{content.hexdigest()}\n".encode())
    return f"sha256:{total.hexdigest()}"


def verified_tree(source: Path, expected: str) -> str:
    """Raises ModelRefused when there is nothing at `source`, or something else than declared (empty: anything goes)."""
    if not source.is_dir() or not any(source.iterdir()):
        message = f"no model at {source}: expected its folder of a model repository. Correct source.uri."
        raise ModelRefused("weights_missing", message)
    found = tree_digest(source)
    if expected and found != expected:
        message = f"the model at {source} is not the declared one: declared {expected}, found {found}."
        raise ModelRefused("weights_digest_mismatch", message)
    return found


def remote_identity(expected: str, server: str) -> str:
    """Of weights that only an attached server has. They cannot be checked, so a declared digest is refused."""
    if expected:
        message = (
            "source.digest is declared, but the weights are on a server that runs already, where nobody can check "
            "them. Remove source.digest, or let the server be started here (backend.config.server)."
        )
        raise ModelRefused("weights_not_verifiable", message)
    return f"unverified:{server}"
