"""Which flags a kind of run gives the broker's JVM."""

from __future__ import annotations

from pathlib import Path

import pytest

from sie_stream.edge.java import Compiler, Java


@pytest.mark.parametrize(
    ("compiler", "asked", "flags"),
    [
        ("quick", None, {"-Xmx512m", "-XX:+UseSerialGC"}),
        ("quick", 256, {"-Xmx256m", "-XX:+UseSerialGC"}),
        ("steady", None, {"-Xmx1024m", "-Xms1024m", "-Xmn640m", "-XX:+UseParallelGC"}),
        ("steady", 512, {"-Xmx512m", "-Xms512m", "-Xmn320m", "-XX:+UseParallelGC"}),
    ],
)
def test_memory_is_that_of_the_kind_of_run_unless_some_is_asked_for(
    compiler: Compiler, asked: int | None, flags: set[str]
) -> None:
    found = Java(Path("java"), "25.0.2", "").memory_flags(compiler, asked)
    assert set(found) - {"-XX:-UseAdaptiveSizePolicy"} == flags
