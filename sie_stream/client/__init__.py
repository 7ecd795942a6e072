"""The SDK: `from sie_stream.client import Client`."""

from sie_stream.client.async_client import AsyncClient
from sie_stream.client.requests import InferenceResult, Request, RequestFailed, ResultTimeout
from sie_stream.client.streaming import TextDelta
from sie_stream.client.sync_client import Client, Submission
from sie_stream.records import InputsRef

__all__ = [
    "AsyncClient",
    "Client",
    "InferenceResult",
    "InputsRef",
    "Request",
    "RequestFailed",
    "ResultTimeout",
    "Submission",
    "TextDelta",
]
