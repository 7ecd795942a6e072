"""Hands declarations to the scheduler and waits for what it decides."""

from __future__ import annotations

import getpass
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from schemas.codec import decode_row
from schemas.wire import CodecError
from sie_stream.cli.ask import NotReady, Tick, ask, of_kind
from sie_stream.cli.workers import cluster_state
from sie_stream.control import ApplyModel, Decision, DeleteModel, InstanceRow, ReplicaRow
from sie_stream.edge.connection import Connection
from sie_stream.errors import ConfigError, SieError
from sie_stream.ids import TopicPartition
from sie_stream.records import LogRecord
from sie_stream.rollout_records import STABLE
from sie_stream.spec import BUILT_IN_BACKENDS, KIND, ModelSpec, Problem, SpecError, parse_documents, to_json
from sie_stream.spec.bases import named_base

SUFFIXES = (".yaml", ".yml", ".json")
APPLY_ANSWERS = frozenset({"model_accepted", "model_rejected", "model_unchanged", "rollout_started"})
DELETE_ANSWERS = frozenset({"model_deleting", "delete_ignored"})
DECLARATION_BYTES_MAX = 1_000_000
KIND_IN_YAML = re.compile(r"^(?:- )?kind\s*:", re.MULTILINE)
API_VERSION_IN_JSON = re.compile(r'"apiVersion"\s*:\s*"')
POLL_MS = 50


def specs_for(connect: Callable[[], Connection], *paths: Path) -> tuple[list[tuple[ModelSpec, Path]], Connection]:
    """As `load_specs`, and the connection; backends that are not built in are those that workers have told of.

    A backend is installed beside workers, which may be elsewhere: what is installed here says nothing.
    """
    try:
        return _load_all(paths), connect()
    except SpecError as wrong:
        if not any(problem.allowed == BUILT_IN_BACKENDS for problem in wrong.problems):
            raise  # none of them is about a backend that may be a plug-in
        try:
            connection = connect()
        except SieError:
            raise wrong from None  # without workers to ask, a misspelt name is the nearer mistake
    told = {name for worker in cluster_state(connection).workers.values() for name in worker.backends}
    return _load_all(paths, (*BUILT_IN_BACKENDS, *sorted(told - set(BUILT_IN_BACKENDS)))), connection


def _load_all(
    paths: Sequence[Path], backends: Collection[str] | None = BUILT_IN_BACKENDS
) -> list[tuple[ModelSpec, Path]]:
    """Of all these files and folders. What is wrong in any is told at once."""
    specs: list[tuple[ModelSpec, Path]] = []
    problems: list[Problem] = []
    for path in paths:
        try:
            specs += load_specs(path, backends)
        except SpecError as wrong:
            problems += wrong.problems
    if problems:
        raise SpecError(problems)
    return specs


def load_specs(path: Path, backends: Collection[str] | None = BUILT_IN_BACKENDS) -> list[tuple[ModelSpec, Path]]:
    """Declarations of a file, or of all files below a folder, each with the folder its relative paths start from.

    backends: names that may be used; None: any. Raises ConfigError when there is none, SpecError when one is wrong.
    """
    if not path.exists():
        raise ConfigError(f"--file {path}: no such file or folder")
    files = (
        [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and _is_declaration(p))
    )
    if not files:
        raise ConfigError(f"--file {path}: no declarations ({', '.join(SUFFIXES)}) below this folder")
    specs: list[tuple[ModelSpec, Path]] = []
    problems: list[Problem] = []
    for file in files:
        try:
            specs += [(spec, file.parent) for spec in parse_documents(_text(file), str(file), backends)]
        except SpecError as wrong:  # the other files may be wrong, too, and all of it is told at once
            problems += wrong.problems
    if problems:
        raise SpecError(problems)
    return specs


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError([Problem("", "", f"cannot be read as text: {error}.", where=str(file))]) from error


def _is_declaration(path: Path) -> bool:
    """In a folder of models, weights and tokenizers lie beside the declaration; they are not declarations.

    An object as Kubernetes has them counts whatever its kind: one that nobody knows is refused, for it may be misspelt.
    """
    text = path.read_text(errors="replace") if path.stat().st_size < DECLARATION_BYTES_MAX else ""
    has_kind = API_VERSION_IN_JSON if path.suffix == ".json" else KIND_IN_YAML
    return any(word in text for word in ("model_id", "modelId", KIND)) or has_kind.search(text) is not None


def with_absolute_paths(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Workers run in other folders: relative paths of the source, and of an adapter's base, start at the declaration's
    own folder.
    """
    if spec.source.kind == "file":
        path = str((folder / spec.source.uri.removeprefix("file://")).resolve())
        spec = spec.model_copy(update={"source": spec.source.model_copy(update={"uri": path})})
    base = spec.backend.config.get("base")
    if spec.lora is None or spec.backend.name != "torch" or not isinstance(base, str) or _of_other_scheme(base):
        return spec  # servers of others have names for bases that are no paths
    if named_base(spec) is not None:
        return _without_absent_tokenizer(spec)  # a declared model, which the scheduler knows, with its tokenizer
    at = (folder / base.removeprefix("file://")).resolve()
    backend = spec.backend.model_copy(update={"config": spec.backend.config | {"base": str(at)}})
    return _with_tokenizer_of_base(spec.model_copy(update={"backend": backend}), at)


def _of_other_scheme(path: str) -> bool:
    return "://" in path and not path.startswith("file://")


def _with_tokenizer_of_base(spec: ModelSpec, base: Path) -> ModelSpec:
    """The tokenizer beside the adapter if there is one, else that of its base: PEFT writes none."""
    if spec.tokenizer is None:
        return spec
    beside, below = (folder / spec.tokenizer.path for folder in (Path(spec.source.uri), base))
    if beside.exists() or not below.exists():
        return spec
    return spec.model_copy(update={"tokenizer": spec.tokenizer.model_copy(update={"path": str(below)})})


def _without_absent_tokenizer(spec: ModelSpec) -> ModelSpec:
    """An adapter whose folder is here without the tokenizer has that of its base."""
    here = Path(spec.source.uri)
    if spec.tokenizer is None or not here.is_dir() or (here / spec.tokenizer.path).exists():
        return spec
    return spec.model_copy(update={"tokenizer": None})


def apply_specs(
    connection: Connection,
    specs: Sequence[tuple[ModelSpec, Path]],
    timeout_s: float,
    on_ready: Callable[[int], None],
    tick: Tick,
) -> list[Decision]:
    """Declare models and wait until each is ready; `on_ready` gets the count so far. Raises NotReady, ConfigError.

    What a rollout brings is not waited for.
    """
    decisions = declare(connection, specs, timeout_s, tick)
    refused = [decision for decision in decisions if decision.kind == "model_rejected"]
    if refused:
        raise ConfigError("\n".join(f"{decision.subject}: {decision.reason}" for decision in refused))
    wait_ready(connection, awaited(decisions), timeout_s, on_ready, tick)
    return decisions


def declare(
    connection: Connection, specs: Sequence[tuple[ModelSpec, Path]], timeout_s: float, tick: Tick
) -> list[Decision]:
    """Write ApplyModel for each and return the scheduler's answers. Raises NotReady when it stays silent."""
    actor = getpass.getuser()
    specs = sorted(specs, key=lambda one: named_base(one[0]) is not None)  # a base is declared before what names it
    records = [ApplyModel(msgspec.Raw(to_json(with_absolute_paths(spec, folder))), actor) for spec, folder in specs]
    return ask(connection, records, [spec.model_id for spec, _ in specs], of_kind(APPLY_ANSWERS), timeout_s, tick)


def delete(connection: Connection, model: str, timeout_s: float, tick: Tick) -> Decision:
    command = DeleteModel(model, getpass.getuser())
    return ask(connection, [command], [model], of_kind(DELETE_ANSWERS), timeout_s, tick)[0]


def rolls_out(answer: Decision) -> bool:
    """The declaration is not applied at once: a rollout takes it over, or gives it up."""
    return answer.kind == "rollout_started" or bool(answer.chosen.get("rollout"))


def awaited(answers: Sequence[Decision]) -> dict[str, int]:
    """{model: offset of the ApplyModel that its row must have seen}, of what loads now.

    -1 where nothing changed: any row will do.
    """
    return {
        answer.subject: answer.cause_offset if answer.kind == "model_accepted" else -1
        for answer in answers
        if answer.kind != "model_rejected" and not rolls_out(answer)
    }


def is_ready(row: InstanceRow | None, applied_offset: int) -> bool:
    """What was applied there answers. An older version that still serves beside it does not count.

    One that sleeps was ready, and the next request wakes it: a new declaration would have woken it before.
    """
    if row is None or row.applied_offset < applied_offset:
        return False
    serves = any(own.state == "ready" and own.generation == row.generation for own in _own(row))
    return row.status == "asleep" or (row.status == "ready" and serves)


def is_given_up(row: InstanceRow | None, applied_offset: int) -> bool:
    """What was applied there failed too often, so waiting is of no use."""
    return row is not None and row.applied_offset >= applied_offset and row.given_up


def _own(row: InstanceRow) -> list[ReplicaRow]:
    return [replica for replica in row.replicas if replica.variant == STABLE]


class NotServing(NotReady):
    """Models that were accepted and do not serve as declared: `left` by name, `older` those of them with a version
    that goes on, `partly` those with some of the replicas.
    """

    def __init__(
        self, message: str, left: Sequence[str], older: Collection[str] = (), partly: Collection[str] = ()
    ) -> None:
        super().__init__(message)
        self.left = tuple(left)
        self.older = tuple(older)
        self.partly = tuple(partly)


def stays_declared(left: Sequence[str], older: Collection[str] = (), partly: Collection[str] = ()) -> str:
    """What becomes of accepted declarations that nobody waits for any more, and how to take them back."""
    name = left[0] if len(left) == 1 else "MODEL"
    text = f"{'It stays' if len(left) == 1 else 'They stay'} declared: `sie-stream describe {name}` shows why, "
    text += f"`sie-stream delete {name}` removes it"
    if older:
        return f"{text} with the version that goes on serving; to go back to that one, apply its declaration again."
    if partly:
        return f"{text} with the replicas that serve; to take the change back, apply the declaration of before."
    return f"{text}; `sie-stream apply` again waits on, and tries anew what was given up."


def _not_serving(left: Sequence[str], states: Mapping[str, InstanceRow], what: str) -> NotServing:
    older = [name for name in left if name in states and _older(states[name])]
    partly = [name for name in left if name in states and _serves_partly(states[name])]
    return NotServing(why_not(left, states, what), left, older, partly)


def _older(row: InstanceRow) -> set[str]:
    """Versions of before that serve meanwhile."""
    return {own.version for own in _own(row) if own.state == "ready" and own.generation != row.generation}


def _serves_partly(row: InstanceRow) -> str:
    """With how many of its replicas what was applied serves meanwhile, as a sentence; empty: it does not."""
    ready = sum(own.state == "ready" and own.generation == row.generation for own in _own(row))
    return f"It serves with {ready} of {row.replicas_wanted} replicas." if 0 < ready < row.replicas_wanted else ""


def wait_ready(
    connection: Connection, wanted: Mapping[str, int], timeout_s: float, on_ready: Callable[[int], None], tick: Tick
) -> None:
    """Wait until every instance is ready as `wanted` (see `awaited`).

    Raises NotServing with the scheduler's words about those that are not, as soon as all of these were given up.
    """
    reader = connection.reader()
    rows: dict[bytes, InstanceRow] = {}
    try:
        topic = connection.settings.topics.instances
        places = [TopicPartition(topic, n) for n in range(reader.partitions_of(topic))]
        ends = reader.end_offsets(places)
        reader.assign(reader.beginning_offsets(places))
        deadline = time.monotonic() + timeout_s
        while True:
            # A row further up may be of long ago, as the topic is compacted only now and then.
            is_read = all(reader.position(place) >= end for place, end in ends.items())
            states = {row.model: row for row in rows.values()}
            left = sorted(model for model, offset in wanted.items() if not is_ready(states.get(model), offset))
            on_ready(len(wanted) - len(left))
            if is_read and not left:
                return
            if is_read and all(is_given_up(states.get(model), wanted[model]) for model in left):
                raise _not_serving(left, states, "could not be loaded:")
            for record in reader.poll(5_000, POLL_MS):
                if record.value is None:
                    rows.pop(record.key or b"", None)
                else:
                    _take(rows, record)
            tick()
            if time.monotonic() > deadline:
                raise _not_serving(left, states, f"not ready after {timeout_s:g} s:")
    finally:
        reader.close()


def _take(rows: dict[bytes, InstanceRow], record: LogRecord) -> None:
    try:
        rows[record.key or b""] = decode_row(record.value, InstanceRow)
    except CodecError:
        rows.pop(record.key or b"", None)  # somebody else's record: `sie-stream get instances` tells of it


def why_not(left: Sequence[str], states: Mapping[str, InstanceRow], what: str) -> str:
    """One line about each, with the version that serves meanwhile."""
    lines = [f"{len(left)} {'model' if len(left) == 1 else 'models'} {what}"]
    for name in left[:8]:
        row = states.get(name)
        if row is None:
            lines.append(f"  {name}: unknown to the scheduler")
            continue
        older = _older(row)
        serves = f"Version {', '.join(sorted(older))} goes on serving." if older else _serves_partly(row)
        lines.append(f"  {name} {row.version}: {row.status} {row.message} {serves}".rstrip())
    return "\n".join(lines)
