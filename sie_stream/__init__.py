"""SIE-Stream: a Scalable Inference Engine as an event-driven pipeline on Apache Kafka.

The SDK is at hand as `from sie_stream import Client`. It is imported on first use: engine processes and pure code
import this package too, and must not load a Kafka client for it.
"""

from importlib import import_module

__version__ = "0.1.0"

SDK = ("AsyncClient", "Client", "InferenceResult", "Request", "RequestFailed", "ResultTimeout", "Submission")


def __getattr__(name: str) -> object:
    if name in SDK:
        return getattr(import_module("sie_stream.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
