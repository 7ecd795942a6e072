"""A report for people, on the terminal."""

from __future__ import annotations

from rich.table import Table

from sie_stream.cli.output import as_text, console
from sie_stream.replay.compare import CAUSES
from sie_stream.replay.report import Difference, ModelReport, Report, Spread

LISTED = 10


def show_report(report: Report) -> None:
    if report.partial:
        console.print("[bold yellow]PARTIAL[/]: stopped before its end; what is missing is not counted")
    verdict = "[bold green]all the same[/]" if report.same else ""
    if report.partial and report.replayed and report.no_difference:
        verdict = "[bold yellow]all the same so far[/]"
    if report.empty:
        verdict = "[bold yellow]nothing compared[/]"
    console.print(f"[bold]replay of {report.title}[/] {verdict}", highlight=False)
    console.print(
        f"{report.replayed} answered again in {report.seconds:.1f} s ({report.per_second:.0f}/s): "
        f"{report.equal} equal, {report.within} within tolerance, {report.different} different",
        highlight=False,
    )
    if report.unscored:
        parts = ", ".join(f"{count} {status}" for status, count in report.unscored.items())
        console.print(f"not compared, nobody was answered from an engine then: {parts}", highlight=False)
    _causes(report)
    _models(report.models)
    for model in report.models:
        _changes(model)
    _differences(report.differences)
    for reason, count in report.reasons.items():
        console.print(f"{count} x {reason}", highlight=False, markup=False)
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    console.print(f"exact: {report.exact}", highlight=False, markup=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.upper(), overflow="fold")
    return table


def _causes(report: Report) -> None:
    if not report.causes:
        return
    table = _table("cause", "records", "meaning")
    for cause, count in report.causes.items():
        table.add_row(cause, str(count), CAUSES[cause])  # type: ignore[index]  # a report's causes are Causes
    console.print(table)


def _models(models: tuple[ModelReport, ...]) -> None:
    if not models:
        return
    table = _table(
        "model", "versions", "replayed", "equal", "different", "labels changed", "psi", "ks", "score p50", "ms"
    )
    for one in models:
        table.add_row(
            one.model,
            versions(one),
            str(one.replayed),
            str(one.equal),
            str(one.different),
            str(one.labels_changed),
            f"{one.psi:.4f}",
            f"{one.ks:.4f}",
            spread(one.scores),
            spread(one.latency),
        )
    console.print(table)


def versions(model: ModelReport) -> str:
    before, after = ", ".join(model.before_versions), ", ".join(model.after_versions)
    return before if before == after else f"{before} -> {after}"


def spread(found: Spread | None) -> str:
    if found is None or found.before_p50 is None or found.after_p50 is None:
        return "-"
    return f"{found.before_p50:.4g} -> {found.after_p50:.4g}"


def _changes(model: ModelReport) -> None:
    for change in model.changes[:LISTED]:
        console.print(
            f"{model.model}: {change.before} -> {change.after}: {change.count}", highlight=False, markup=False
        )


def _differences(found: tuple[Difference, ...]) -> None:
    if not found:
        return
    table = _table("request", "place", "cause", "decision or fields", "before", "after")
    for one in found[:LISTED]:
        place = f"{one.place.topic}[{one.place.partition}]@{one.place.offset}" if one.place.topic else "-"
        what = one.decision or ", ".join(one.fields)
        table.add_row(*as_text((one.request_id, place, one.cause, what, one.before, one.after)))
    console.print(table)
    if len(found) > LISTED:
        console.print(f"{LISTED} of {len(found)} listed differences; the others with -o json, --html or --parquet")
