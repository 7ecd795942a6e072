"""Where the base of an adapter lies, and what is said of everything that is none."""

from __future__ import annotations

from pathlib import Path

from gpu_worker.backends.base import ModelRefused
from gpu_worker.backends.weights import ADAPTER_CONFIG, local_source
from sie_stream.control import ModelLaunch

FIELD = "backend.config.base"


def base_of(launch: ModelLaunch) -> Path | None:
    """The base's folder or GGUF file; None: the model is no adapter. Raises ModelRefused that says what to give."""
    given = launch.config.get("base")
    if given in (None, ""):
        if launch.config.get("base_digest"):
            message = f"backend.config.base_digest is of the base of an adapter, and there is no {FIELD}: give both."
            raise ModelRefused("invalid_model_config", message)
        return None
    if str(given).startswith("model:"):
        message = (
            f"{FIELD}: {str(given)!r}: the declaration of that model is not known, so nobody can say where its weights "
            "are. Apply it before the adapter, or give its folder instead."
        )
        raise ModelRefused("weights_missing", message)
    base = local_source(str(given), FIELD)
    why = _no_base(base) if _there(base, "") else "there is no such folder on this worker."
    if why:
        wanted = (
            "Expected is the folder of the model that the adapter was trained on, or its GGUF file, by an absolute "
            "path; a declared model is named as `model:NAME`."
        )
        raise ModelRefused("weights_missing", f"{FIELD}: {str(given)!r}: {why} {wanted}")
    return base


def refuse_adapter(source: Path) -> None:
    """Raises ModelRefused for the folder of an adapter where that of a whole model is expected."""
    if _there(source, ADAPTER_CONFIG) and not _there(source, "config.json"):
        raise ModelRefused(
            "weights_unreadable",
            f"{source} is the folder of a LoRA adapter ({ADAPTER_CONFIG}, no config.json). Declare its base, too: "
            f"`lora: {{base: MODEL, rank: RANK}}` and the folder of that model as {FIELD}.",
        )


def _no_base(base: Path) -> str:
    """Why not; empty: it may be one."""
    if base.is_file():
        return "" if base.suffix == ".gguf" else "it is a file."
    if _there(base, "config.json") or any(base.glob("*.gguf")):
        return ""
    if _there(base, ADAPTER_CONFIG):
        return "it is an adapter itself, and an adapter over another one is not followed."
    return "there is neither a config.json nor a *.gguf in it."


def _there(folder: Path, name: str) -> bool:
    try:
        return (folder / name).exists()
    except OSError:  # we may not look
        return False
