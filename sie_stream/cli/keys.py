"""`sie-stream keys`: the key ring of personal data, and the data keys of each subject on sie.keys."""

from __future__ import annotations

import getpass
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from sie_stream.cli.declared_outputs import declared_outputs
from sie_stream.cli.output import (
    BootstrapOption,
    OutputFormat,
    OutputOption,
    console,
    json_line,
    show_json,
    tell,
    with_examples,
)
from sie_stream.cli.plain_topics import plain_in_words, plain_topics
from sie_stream.cli.since import shown_time
from sie_stream.edge.connection import Connection
from sie_stream.edge.env_settings import load_settings
from sie_stream.edge.kafka_log import KafkaTransactionalWriter
from sie_stream.edge.key_table import KeyReaders, key_readers, key_table_of
from sie_stream.edge.key_topic import rewrap, shred
from sie_stream.edge.keyring import Keyring, add_kek, create_keyring
from sie_stream.errors import ConfigError
from sie_stream.privacy.datakeys import Shredded
from sie_stream.privacy.declared import DeclaredOutputs
from sie_stream.privacy.forms import Hashed, Sealed, changed_forms, hashed_text, sealed_text
from sie_stream.privacy.vault import KeyUnavailable, Opener
from sie_stream.settings import Settings
from topics.edge.admin import KafkaAdmin
from topics.plan import is_held

app = typer.Typer(
    help=with_examples(
        "Keys that protect personal data: make, rotate, list, and shred those of one person.",
        "sie-stream keys create --ring keys",
        "sie-stream keys shred customer-17 --reason 'asked for on 3 March'",
    ),
    no_args_is_help=True,
)
RingOption = Annotated[
    Path | None, typer.Option("--ring", help="Folder of the key ring. Default: SIE_STREAM_PII_KEYS.")
]


@app.command("create")
def create(ring: RingOption = None, output: OutputOption = OutputFormat.TABLE) -> None:
    """Make a key ring: a key for the hashes of subjects, and a first key-encryption key, readable by you only.

    Every host with workers needs a copy, with SIE_STREAM_PII_KEYS naming its folder.

    \b
    Examples:
      sie-stream keys create --ring keys
      export SIE_STREAM_PII_KEYS=$PWD/keys
    """
    folder = _folder(ring)
    _tell({"ring": str(folder), "current": create_keyring(folder).current}, output)


@app.command("rotate")
def rotate(
    ring: RingOption = None, bootstrap_servers: BootstrapOption = None, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Make a new key-encryption key and put every data key under it; nothing protected has to be written again.

    Copy the new file to every host with workers; they use it for new data keys from their next start on, at the latest.
    The old file must stay while hashed values are to be compared, and until `keys list` shows no data key under it.
    The new file is made once Kafka was found ready. From then on it stays even when the rest fails, since data keys
    may be under it already: rotate again to bring the others along.

    \b
    Examples:
      sie-stream keys rotate
    """
    folder = _folder(ring)
    Keyring(folder)  # one that cannot be used is told before anybody looks for Kafka
    with _changing(bootstrap_servers) as (settings, readers, writer):
        found = rewrap(readers, writer, settings.topics, lambda: add_kek(folder))
    told = {"current": found.current, "rewrapped": found.rewrapped, "not_on_this_ring": found.unknown}
    _tell({"ring": str(folder), **told}, output)


@app.command("list")
def list_(
    ring: RingOption = None, bootstrap_servers: BootstrapOption = None, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Key-encryption keys and how many data keys each wraps, and the subjects that were shredded.

    \b
    Examples:
      sie-stream keys list -o json
    """
    keyring = Keyring(_folder(ring))
    table = key_table_of(Connection.open(bootstrap_servers))
    wraps = Counter(wrapped.kek for wrapped in table)
    names = sorted({*keyring.keks, *wraps})
    found: dict[str, Any] = {
        "current": keyring.current,
        "subjects": len({wrapped.subject for wrapped in table}),
        "keks": [{"kek": name, "here": name in keyring.keks, "data_keys": wraps[name]} for name in names],
        "shredded": [msgspec.to_builtins(fact) for fact in table.shreds.values()],
    }
    if output is OutputFormat.JSON:
        show_json(found)
        return
    for one in found["keks"]:
        marks = [" (current)" if one["kek"] == keyring.current else "", "" if one["here"] else " (not on this ring)"]
        console.print(f"{one['kek']}{''.join(marks)}: {one['data_keys']} data keys", highlight=False)
    for fact in table.shreds.values():
        said = f"shredded {fact.subject} at {shown_time(fact.at_ms)} by {fact.actor}, {len(fact.data_keys)} data keys"
        console.print(f"{said}{': ' if fact.reason else ''}{fact.reason}", highlight=False, markup=False)


@app.command("shred")
def shred_(
    subject: Annotated[
        str, typer.Argument(help="The person, as requests name it (privacy.subject, session or key).")
    ] = "",
    key_hex: Annotated[str, typer.Option(help="The person's record key in hexadecimal, where it is no text.")] = "",
    reason: Annotated[str, typer.Option("--reason", help="Why, for whoever looks at it later.")] = "",
    ring: RingOption = None,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Remove every data key of a person: nobody can ever read what was encrypted for them. It cannot be undone.

    Kafka takes the keys off its disks within a day. Requests and work items are not encrypted: it says which topics may
    still hold what the person sent, and until when their retention keeps that. Fields marked `hash` stay hashes.
    Requests of that person that are answered later are encrypted with a new key; when some were under way, run it again
    after them. Exit code 1 when nothing was ever held for that person.

    \b
    Examples:
      sie-stream keys shred customer-17 --reason "asked for on 3 March"
      sie-stream keys shred --key-hex 00000000000000ff
    """
    person, named = named_person(subject, key_hex)
    name = Keyring(_folder(ring)).subject_of(person)
    with _changing(bootstrap_servers) as (settings, readers, writer):
        described = KafkaAdmin.of(settings).describe_all(settings.topic_prefix)
        found = next((one for one in described if one.topic == settings.topics.keys), None)
        if found is not None and is_held(found):
            raise ConfigError(
                f"{found.topic} is under a legal hold, which keeps what is to be shredded: release it first"
            )
        told = (round(time.time() * 1_000), getpass.getuser(), reason)
        fact, removed = shred(readers, writer, settings.topics, name, told)
        plain = plain_topics(settings.topics, described, told[0])
    if output is OutputFormat.JSON:
        still = [msgspec.to_builtins(topic) for topic in plain]
        counts = {"removed": removed, "data_keys": len(fact.data_keys), "at_ms": fact.at_ms}
        show_json({"subject": fact.subject, **counts, "plain": still})
    else:
        lines = [*shredded_in_words(named, fact, removed), *plain_in_words(plain)]
        console.print("\n".join(lines), highlight=False, markup=False)


def named_person(subject: str, key_hex: str) -> tuple[bytes, str]:
    """The person as requests name it, and as it is told. Raises ConfigError for what names nobody."""
    if bool(subject) == bool(key_hex):
        raise ConfigError("name one person: as SUBJECT, or with --key-hex where the record key is no text")
    if key_hex:
        try:
            return bytes.fromhex(key_hex), f"key {key_hex}"
        except ValueError as error:
            raise ConfigError(f"--key-hex {key_hex!r}: pairs of hexadecimal digits are expected: {error}") from error
    try:
        return subject.encode(), subject
    except UnicodeEncodeError as error:
        raw = subject.encode("utf-8", "surrogateescape")
        raise ConfigError(
            f"SUBJECT is no UTF-8 text: {raw!r}, at character {error.start}. Sessions and fields are text; for a "
            f"record key of just these bytes say --key-hex {raw.hex()}"
        ) from error


def shredded_in_words(person: str, fact: Shredded, removed: int) -> Iterator[str]:
    """What happened to the keys of a person, for people."""
    if removed:
        yield f"shredded {person}: {removed} of {len(fact.data_keys)} data keys now, at {shown_time(fact.at_ms)}"
    else:
        yield f"{person} was shredded before, at {shown_time(fact.at_ms)} by {fact.actor}; nothing is held since"
    yield f"`keys list` shows this person as {fact.subject}"


@app.command("open")
def open_(ring: RingOption = None, bootstrap_servers: BootstrapOption = None) -> None:
    """Results in JSON from standard input, as a list or one a line: each on a line, encrypted outputs in plain.

    What cannot be read stays as it is, and why is said on standard error. Exit code 1 when there was any.

    \b
    Examples:
      sie-stream results --request-id 6f1c... -o json | sie-stream keys open
    """
    keyring = Keyring(_folder(ring))
    connection = Connection.open(bootstrap_servers)
    opener = Opener(key_table_of(connection), keyring)
    closed = 0
    with closing(connection.reader()) as reader:
        declared = declared_outputs(reader, connection.settings.topics, connection.reader)
        for place, result in read_results(sys.stdin):
            closed += _tell_opened(place, result, opener, declared)
    if closed:
        raise typer.Exit(1)


def _tell_opened(place: str, result: dict[str, Any], opener: Opener, declared: DeclaredOutputs) -> int:
    """How many of its values cannot be read."""
    outputs, refused = plain_outputs(opener, declared, result)
    for why in refused:
        tell(f"{place}: {why}")
    typer.echo(json_line({**result, "outputs": outputs}))
    return len(refused)


def read_results(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Results and where each stood: of JSON lines as they come, or of one JSON list, as `results -o json` writes it.

    Raises ConfigError for what is neither.
    """
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    for number, line in numbered:
        listed = line.lstrip().startswith("[")
        text = "".join((line, *(more for _, more in numbered))) if listed else line
        try:
            found = msgspec.json.decode(text, type=list[dict[str, Any]] if listed else dict[str, Any])
        except msgspec.DecodeError as error:
            what = "is no list of results" if listed else "is no result"
            raise ConfigError(f"line {number}{' and what follows' if listed else ''} {what}: {error}") from error
        if isinstance(found, list):
            yield from ((f"result {index}", result) for index, result in enumerate(found, 1))
        else:
            yield f"line {number}", found


def plain_outputs(opener: Opener, declared: DeclaredOutputs, result: Mapping[str, Any]) -> tuple[object, list[str]]:
    """Outputs of a result with what can be read in plain, and why the rest cannot be.

    What opens was sealed for just that place. What does not may be a text that only looks so, unless its version
    declares protected values there.
    """
    model, version, outputs = str(result.get("model", "")), str(result.get("version", "")), result.get("outputs")
    refused: list[str] = []

    def plain(path: str, form: Sealed | Hashed) -> Any:
        if isinstance(form, Hashed):
            return hashed_text(form)
        try:
            return opener.opened(model, "outputs", path, form)
        except KeyUnavailable as error:
            places = declared.protected(model, version)
            if places is None or path in places:
                refused.append(f"{path}: {error}")
            return sealed_text(form)

    changed = changed_forms(msgspec.json.encode(outputs), plain)
    assert changed is not None
    return msgspec.json.decode(changed), refused


def _folder(ring: Path | None) -> Path:
    if ring is not None:
        return ring
    configured = load_settings().pii_keys
    if not configured:
        raise ConfigError("no key ring: give --ring DIR, or set SIE_STREAM_PII_KEYS=DIR")
    return Path(configured)


@contextmanager
def _changing(bootstrap_servers: str | None) -> Iterator[tuple[Settings, KeyReaders, KafkaTransactionalWriter]]:
    connection = Connection.open(bootstrap_servers)
    transactional_id = connection.settings.topics.keys_transactional_id
    with key_readers(connection) as readers, closing(connection.transactional_writer(transactional_id)) as writer:
        yield connection.settings, readers, writer


def _tell(found: dict[str, Any], output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        show_json(found)
    else:
        console.print("\n".join(f"{name:<18}{value}" for name, value in found.items()), highlight=False, markup=False)
