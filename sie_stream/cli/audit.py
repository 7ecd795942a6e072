"""`sie-stream audit`: its commands. Signing needs cryptography, and only `decisions` the scheduler."""

from __future__ import annotations

import typer

from sie_stream.cli.late import Late, LateGroup
from sie_stream.cli.output import with_examples

COMMANDS = {
    "verify": Late(
        "sie_stream.cli.audit_requests:verify",
        "Prove that each request of a range has exactly one terminal record, and that its provenance holds.",
    ),
    "export": Late(
        "sie_stream.cli.audit_bundle:export",
        "Write requests, work, results, decisions, dead letters, schemas and model cards of a range into a signed "
        "folder.",
    ),
    "check": Late(
        "sie_stream.cli.audit_bundle:check",
        "Check a bundle without Kafka: signature, every byte of every file, nothing missing, nothing added.",
    ),
    "keygen": Late("sie_stream.cli.audit_bundle:keygen", "Make a key. A file that is there is never written over."),
    "decisions": Late(
        "sie_stream.cli.audit_decisions:decisions",
        "Fold sie.cluster again with the scheduler's own code and demand the same decisions, byte for byte.",
    ),
}


class AuditCommands(LateGroup):
    """What the log is checked for."""

    late = COMMANDS


app = typer.Typer(
    cls=AuditCommands,
    help=with_examples(
        "Check what the engine did against its log, and take the proof along.",
        "sie-stream audit verify --from 24h",
        "sie-stream audit decisions",
    ),
    no_args_is_help=True,
)
