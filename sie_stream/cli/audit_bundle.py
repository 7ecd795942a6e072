"""`sie-stream audit export|check|keygen`: the evidence of a range as a signed folder, checked without Kafka."""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from hashlib import file_digest
from pathlib import Path
from secrets import token_bytes
from typing import Annotated

import msgspec
import typer

from schemas.catalog import CURRENT, released_text
from sie_stream import __version__
from sie_stream.auditing.bundle import (
    FORMAT,
    MANIFEST,
    PUBLIC_KEY,
    SIGNATURE,
    UNLISTED,
    FileEntry,
    Manifest,
    differences,
    manifest_bytes,
    read_manifest,
)
from sie_stream.auditing.requests import RequestAudit
from sie_stream.cli.audit_contents import Payloads, write_tables
from sie_stream.cli.audit_models import write_models
from sie_stream.cli.audit_requests import Cut, Range, cut_of, in_words, verified
from sie_stream.cli.declared_outputs import declared_outputs
from sie_stream.cli.output import BootstrapOption, OutputFormat, OutputOption, console, show_json
from sie_stream.cli.since import since_ms
from sie_stream.cli.trace_lookup import Routes
from sie_stream.edge.connection import Connection
from sie_stream.edge.kafka_log import KafkaReader
from sie_stream.edge.key_table import key_table_of
from sie_stream.edge.signing import (
    Ed25519PrivateKey,
    fingerprint,
    load_private,
    load_public,
    make_key,
    make_secret,
    public_pem,
    read_secret,
    signed_by,
)
from sie_stream.errors import ConfigError

PII_KEY_BYTES = 32
VERIFY = "verify.json"


def keygen(
    path: Annotated[Path, typer.Argument(help="File of the new private key; the public key is beside it, as .pub.")],
    pii: Annotated[
        bool, typer.Option("--pii", help="A key for hashes of personal data instead of one for signatures.")
    ] = False,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Make a key. A file that is there is never written over.

    \b
    Examples:
      sie-stream audit keygen audit.key
      sie-stream audit keygen --pii pii.key
    """
    if pii:
        make_secret(path)
        made = {"path": str(path)}
    else:
        made = {"path": str(path), "public_key": f"{path}.pub", "fingerprint": make_key(path)}
    if output is OutputFormat.JSON:
        show_json(made)
    else:
        console.print("\n".join(f"{name:<12}{value}" for name, value in made.items()), highlight=False, markup=False)


def export(
    bundle: Annotated[Path, typer.Argument(help="Folder to make.")],
    key: Annotated[Path, typer.Option("--key", help="Private key to sign with, of `audit keygen`.")],
    from_: Annotated[str, typer.Option("--from", help="Requests from then on: 2h, 7d ago, or an ISO time.")] = "",
    to: Annotated[str, typer.Option("--to", help="Requests before then. Default: now.")] = "",
    pii_key: Annotated[
        Path | None,
        typer.Option("--pii-key", help="Key of the hashes of personal data. Default: a throw-away one."),
    ] = None,
    bootstrap_servers: BootstrapOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Write requests, work, results, decisions, dead letters, schemas and model cards of a range into a signed folder.

    Fields marked `pii` in a model's schemas are keyed hashes there; outputs that are hashed or encrypted on the topics
    stay as they are, so that shredding a subject reaches bundles too. Exit code 1 when `audit verify` of the range
    finds violations; the bundle is written all the same and says so.

    \b
    Examples:
      sie-stream audit export march --key audit.key --from 2026-03-01T00:00:00+01:00 --to 2026-04-01T00:00:00+01:00
      sie-stream audit export today --key audit.key --from 24h --pii-key pii.key
    """
    signer = load_private(key)
    secret = token_bytes(PII_KEY_BYTES) if pii_key is None else read_secret(pii_key)
    now_ms = round(time.time() * 1_000)
    asked = Range(since_ms(from_, now_ms, "--from") if from_ else 0, since_ms(to, now_ms, "--to") if to else now_ms)
    connection = Connection.open(bootstrap_servers)
    half_done = bundle.with_name(bundle.name + ".part")
    for path in (bundle, half_done):
        if path.exists():
            raise ConfigError(f"{path} exists; remove it or choose another name")
    reader = connection.reader()
    try:
        half_done.mkdir(parents=True)
        manifest, report = _fill(half_done, connection, reader, asked, secret)
        told = {"made_at_ms": now_ms, "pii_key_kept": pii_key is not None}
        manifest = _seal(half_done, msgspec.structs.replace(manifest, **told), signer)
        half_done.rename(bundle)
    finally:
        reader.close()
        shutil.rmtree(half_done, ignore_errors=True)
    if output is OutputFormat.JSON:
        show_json({"bundle": str(bundle), "proven": report.proven, **msgspec.to_builtins(manifest)})
    else:
        console.print("\n".join(in_words(report)), highlight=False, markup=False)
        for why, count in manifest.left_out.items():
            console.print(f"left out: {count} x {why}", highlight=False, markup=False)
        console.print(f"{bundle}: {len(manifest.files)} files, signed by {manifest.signer}", highlight=False)
    if not report.proven:
        raise typer.Exit(1)


def _fill(
    folder: Path, connection: Connection, reader: KafkaReader, asked: Range, secret: bytes
) -> tuple[Manifest, RequestAudit]:
    """Everything but the signature. The manifest is still without a signer and without its files' digests."""
    settings = connection.settings
    routes = Routes(reader, settings.topics)
    cut = cut_of(connection, reader, routes, asked)
    report = verified(connection, reader, routes, cut)
    _write(folder / VERIFY, {"proven": report.proven, **msgspec.to_builtins(report)})
    declared = declared_outputs(reader, settings.topics, connection.reader)
    payloads = Payloads(reader, routes, settings.topics, secret, key_table_of(connection), declared)
    rows = write_tables(folder, connection, reader, routes, cut, payloads)
    _write_schemas(folder / "schemas")
    models, gone = write_models(folder / "models", reader, settings.topics, payloads.answered, payloads.bases)
    manifest = Manifest(
        format=FORMAT,
        made_at_ms=0,
        release=__version__,
        cluster_id=reader.cluster_id(),
        topic_prefix=settings.topic_prefix,
        from_ms=asked.from_ms,
        to_ms=asked.to_ms,
        spans=_spans(cut),
        models=models,
        pii=payloads.pii_fields,
        pii_key_kept=False,
        left_out=payloads.left_out | gone,
        signer="",
        files=dict(_entries(folder, rows)),
        shredded=payloads.shredded,
    )
    return manifest, report


def _seal(folder: Path, manifest: Manifest, signer: Ed25519PrivateKey) -> Manifest:
    """Signs what is in the folder."""
    pem = public_pem(signer.public_key())
    manifest = msgspec.structs.replace(manifest, signer=fingerprint(pem))
    text = manifest_bytes(manifest)
    (folder / MANIFEST).write_bytes(text)
    (folder / SIGNATURE).write_text(signer.sign(text).hex() + "\n", encoding="ascii")
    (folder / PUBLIC_KEY).write_bytes(pem)
    return manifest


def check(
    bundle: Annotated[Path, typer.Argument(help="Folder of `audit export`.")],
    public_key: Annotated[
        Path | None, typer.Option("--public-key", help="Key that must have signed it. Default: the one in the bundle.")
    ] = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Check a bundle without Kafka: signature, every byte of every file, nothing missing, nothing added.

    Exit code 1 names each file that is not as it was signed. Without --public-key the bundle is only shown to be whole,
    not whose it is: anybody can sign with a key of his own. What is intact is as it was exported; whether every request
    of it was proven then is told beside it.

    \b
    Examples:
      sie-stream audit check march --public-key audit.key.pub
    """
    problems, manifest = problems_of(bundle, public_key)
    proven = None if problems else proven_in(bundle)
    if output is OutputFormat.JSON:
        show_json(
            {
                "intact": not problems,
                "proven": proven,
                "signer": None if manifest is None else manifest.signer,
                "signer_known": public_key is not None,
                "shredded": 0 if manifest is None else manifest.shredded,
                "problems": problems,
            }
        )
    elif problems:
        console.print("\n".join(("NOT AS SIGNED", *(f"    {one}" for one in problems))), highlight=False, markup=False)
    elif manifest is not None:
        whose = "" if public_key is not None else ", which is in the bundle itself: compare it with one you trust"
        console.print(f"intact: {len(manifest.files)} files, signed by {manifest.signer}{whose}", highlight=False)
        if proven is False:
            console.print(f"NOT PROVEN when it was made: {VERIFY} in it says what was found", highlight=False)
        if manifest.shredded:
            console.print(f"shredded: {manifest.shredded} results hold values that nobody can read", highlight=False)
    if problems:
        raise typer.Exit(1)


def problems_of(bundle: Path, public_key: Path | None) -> tuple[list[str], Manifest | None]:
    """What is wrong, and the manifest when it can be believed or at least read."""
    if not bundle.is_dir():
        raise ConfigError(f"{bundle}: there is no such folder. Name the folder that `audit export` made.")
    if strange := strangers(bundle):
        return strange, None
    there = {name: bundle / name for name in UNLISTED}
    missing = [f"{name}: missing" for name, path in there.items() if not path.is_file()]
    if missing:
        return missing, None
    text, pem = there[MANIFEST].read_bytes(), there[PUBLIC_KEY].read_bytes()
    problems: list[str] = []
    try:
        own = load_public(pem, PUBLIC_KEY)
        signature = _signature(there[SIGNATURE].read_bytes())
        manifest = read_manifest(text)
    except ConfigError as error:
        return [str(error)], None
    if public_pem(own) != pem or fingerprint(pem) != manifest.signer:
        problems.append(f"{PUBLIC_KEY}: not the key that the manifest names")
    trusted = own if public_key is None else load_public(_bytes(public_key), str(public_key))
    if not signed_by(trusted, signature, text):
        problems.append(f"{MANIFEST}, {SIGNATURE}: the signature does not fit the manifest and the key")
    problems += differences(manifest, dict(_entries(bundle, {})))
    return problems, manifest


def proven_in(bundle: Path) -> bool | None:
    """What `audit verify` said of the range when an intact bundle was made; None: it does not say."""
    try:
        return msgspec.json.decode((bundle / VERIFY).read_bytes(), type=_Proven).proven
    except (OSError, msgspec.MsgspecError):
        return None


class _Proven(msgspec.Struct):
    proven: bool


def _signature(text: bytes) -> bytes:
    """Only the one spelling that `export` writes: a changed letter case is a change too."""
    try:
        signature = bytes.fromhex(text.decode("ascii"))
    except ValueError as error:
        raise ConfigError(f"{SIGNATURE}: no signature") from error
    if text != signature.hex().encode() + b"\n":
        raise ConfigError(f"{SIGNATURE}: not written as `audit export` writes it")
    return signature


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--public-key {path}: cannot be read: {error.strerror}") from error


def strangers(bundle: Path) -> list[str]:
    """What is neither a folder nor a file of its own. A link leads to what may change later, or to a folder that is
    not looked into; a pipe or device would be read for ever.
    """
    found = []
    for path in sorted(bundle.rglob("*")):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            kind = "a link" if stat.S_ISLNK(mode) else "no regular file"
            found.append(f"{path.relative_to(bundle).as_posix()}: {kind}, as no bundle has")
    return found


def _entries(folder: Path, rows: Mapping[str, int]) -> Iterator[tuple[str, FileEntry]]:
    """Every file but those that the signature itself is made of, by its path in the bundle."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or name in UNLISTED:
            continue
        with path.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        yield name, FileEntry(digest, path.stat().st_size, rows.get(name, -1))


def _spans(cut: Cut) -> dict[str, tuple[int, int]]:
    streams = {stream.place: (stretch.audited, stretch.end) for stream, stretch in cut.streams.items()}
    works = {place: (stretch.start, stretch.end) for place, stretch in cut.works.items()}
    results = {place: (span.start, span.end) for place, span in cut.results.items()}
    found = {**streams, **works, **results}
    return {f"{place.topic}/{place.partition}": span for place, span in sorted(found.items())}


def _write(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def _write_schemas(folder: Path) -> None:
    """The Avro schemas that the records were written with."""
    folder.mkdir()
    for name, released in sorted(CURRENT.items()):
        (folder / f"{name}.avsc").write_text(released_text(released), encoding="utf-8")
