"""Options of `produce` and `up` for inputs that are too large for a request."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.reference_store import describe
from sie_stream.errors import ConfigError
from sie_stream.records import InputsRef

InputsRefOption = Annotated[
    str | None,
    typer.Option("--inputs-ref", help="File or fsspec URL of one inputs object, which ingress reads by itself."),
]
Sha256Option = Annotated[
    str | None, typer.Option("--sha256", help="Of --inputs-ref. Default: it is read here to know it.")
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Folder or fsspec URL for inputs too large for a request; ingress must be allowed to read there. "
        "Default: setting reference_store.",
    ),
]
ReferencesOption = Annotated[
    str,
    typer.Option(
        help="Folders or fsspec URLs, separated by commas, from which ingress reads inputs that requests name; whoever "
        "may send requests may have every file below them read. Default: setting reference_prefixes."
    ),
]


def reference(inputs_ref: str | None, sha256: str | None) -> InputsRef | None:
    """What --inputs-ref and --sha256 name. Raises ConfigError and StoreUnavailable."""
    if inputs_ref is None:
        if sha256 is not None:
            raise ConfigError("--sha256 is that of --inputs-ref: give both")
        return None
    url = as_url(inputs_ref)
    return InputsRef(url, sha256) if sha256 else describe(url, load_settings().reference_bytes_max)


def as_url(text: str) -> str:
    """A path as the URL of a local file or folder; URLs as they are."""
    return text if "://" in text else f"file://{Path(text).absolute()}"


def store_url(store: str | None) -> str | None:
    return as_url(store) if store else store


def as_urls(places: str) -> str:
    """Several of them, separated by commas."""
    return ",".join(as_url(place.strip()) for place in places.split(",") if place.strip())
