"""The jars of Apache Kafka: exactly those of kafka_jars.json, each checked by its sha256, in a cache folder.

The download runs in a process of its own (kafka_fetch), because importing jgo takes longer than starting a broker.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sie_stream.edge.file_lock import locked, to_stderr
from sie_stream.errors import LogError

FETCH_TIMEOUT_S = 900


class BrokerFailed(LogError):
    """The embedded broker could not be prepared or started; the message says why and what to do."""


class JarList(msgspec.Struct, frozen=True):
    """Content of kafka_jars.json: Maven coordinate `group:artifact:version` to sha256."""

    kafka: str
    jars: dict[str, str]


@dataclass(frozen=True, slots=True)
class Jar:
    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


_LIST = msgspec.json.decode(Path(__file__).with_name("kafka_jars.json").read_bytes(), type=JarList)
KAFKA_VERSION = _LIST.kafka
JARS = tuple(Jar(*coordinate.split(":"), sha256=digest) for coordinate, digest in sorted(_LIST.jars.items()))


def default_cache_dir() -> Path:
    return Path.home() / ".cache" / "sie-stream"


def jars_dir(cache_dir: Path) -> Path:
    return cache_dir / f"kafka-{KAFKA_VERSION}"


def missing_jars(cache_dir: Path) -> list[str]:
    """File names the cache lacks; empty when a broker can start without a network."""
    folder = jars_dir(cache_dir)
    return [jar.file_name for jar in JARS if not (folder / jar.file_name).is_file()]


def ensure_jars(cache_dir: Path, say: Callable[[str], None] = to_stderr) -> Path:
    """The folder with all jars, downloaded once.

    Several processes may call this at once: one downloads, the others wait for it. The folder appears whole, by one
    rename, so a reader never sees half of it. Raises BrokerFailed.
    """
    if missing_jars(cache_dir):
        with locked(cache_dir / ".kafka-jars.lock", "downloading Apache Kafka", say):
            if missing_jars(cache_dir):
                say("Apache Kafka: downloading its jars (once)")
                _download(cache_dir)
    return jars_dir(cache_dir)


def class_path(folder: Path) -> str:
    """Class path in a fixed order: a class archive is only valid for exactly this text."""
    return os.pathsep.join(str(folder / jar.file_name) for jar in JARS)


def _download(cache_dir: Path) -> None:
    staging = Path(tempfile.mkdtemp(prefix=".kafka-", dir=cache_dir))
    try:
        _fetch_into(staging)
        for jar in JARS:
            check_digest(staging / jar.file_name, jar)
        target = jars_dir(cache_dir)
        if target.exists():  # incomplete: someone removed files from it
            shutil.rmtree(target)
        staging.chmod(0o755)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch_into(folder: Path) -> None:
    command = [sys.executable, "-m", "sie_stream.edge.kafka_fetch", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BrokerFailed(_advice(f"no end after {FETCH_TIMEOUT_S} s")) from error
    if done.returncode != 0:
        raise BrokerFailed(_advice(done.stderr.strip()[-800:] or f"code {done.returncode}"))


def check_digest(path: Path, jar: Jar) -> None:
    """Raises BrokerFailed when the file is missing or not the pinned one."""
    if not path.is_file():
        raise BrokerFailed(_advice(f"{jar.file_name} did not arrive"))
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != jar.sha256:
        raise BrokerFailed(_advice(f"{jar.file_name} has sha256 {found}, expected {jar.sha256}"))


def _advice(problem: str) -> str:
    return (
        f"cannot download Apache Kafka {KAFKA_VERSION} ({len(JARS)} jars, 45 MB): {problem}. "
        "Check the network (Maven Central must be reachable) and try again, put the jars of the Kafka distribution's "
        f"libs folder into <kafka_dir>/kafka-{KAFKA_VERSION} (setting SIE_STREAM_KAFKA_DIR), or use a Kafka of your "
        "own with SIE_STREAM_BOOTSTRAP_SERVERS."
    )
