from sie_stream.client import AsyncClient as AsyncClient
from sie_stream.client import Client as Client
from sie_stream.client import InferenceResult as InferenceResult
from sie_stream.client import Request as Request
from sie_stream.client import RequestFailed as RequestFailed
from sie_stream.client import ResultTimeout as ResultTimeout
from sie_stream.client import Submission as Submission

__version__: str
SDK: tuple[str, ...]
