"""Structured logs of a process: one JSON object per line on standard error."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs(component: str, member: str = "") -> structlog.stdlib.BoundLogger:
    """Send structlog and the standard library's loggers to stderr as JSON, tagged with who speaks."""
    timestamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            timestamp,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format='{"level": "%(levelname)s", "event": "%(message)s"}'
    )
    structlog.contextvars.bind_contextvars(component=component, member=member)
    return structlog.get_logger()
