"""`python -m sie_stream.edge.kafka_fetch FOLDER`: download the jars of kafka_jars.json with jgo, without Maven.

Coordinates are pinned, so nothing is resolved: no POM is read, and jars arrive in parallel.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from jgo.maven import MavenContext

from sie_stream.edge.kafka_jars import JARS, Jar

PARALLEL = 8
ATTEMPTS = 3
TIMEOUT_S = 60


def fetch(folder: Path, jar: Jar) -> None:
    """One jar into `folder`. Raises OSError or RuntimeError when the last attempt fails."""
    for attempt in range(1, ATTEMPTS + 1):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            context = MavenContext(repo_cache=Path(scratch), timeout=TIMEOUT_S)
            try:
                found = context.project(jar.group, jar.artifact).at_version(jar.version).artifact().resolve()
            except (OSError, RuntimeError):  # requests' errors are OSErrors, "not found" is a RuntimeError
                if attempt == ATTEMPTS:
                    raise
                continue
            found.rename(folder / jar.file_name)
            return


def main(folder: Path) -> int:
    with ThreadPoolExecutor(PARALLEL) as pool:
        try:
            list(pool.map(partial(fetch, folder), JARS))
        except (OSError, RuntimeError) as error:
            pool.shutdown(cancel_futures=True)
            sys.stderr.write(f"{error}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
