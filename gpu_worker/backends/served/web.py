"""HTTP to one server on httpx: JSON in, JSON out, and every failure as one of `failures`."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec

from gpu_worker.backends.served.failures import BadAnswer, ServerRefused, ServerTimeout, Unreachable

CONNECT_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 2.0
MESSAGE_CHARS_MAX = 500


class WebClient:
    """Requests to `url`; used from several threads."""

    def __init__(self, url: str) -> None:
        self.url = url
        # What the environment says about proxies is for the internet, not for a server beside us.
        # Without https no certificates are needed, and reading them takes longer than a request.
        self._client = httpx.Client(
            base_url=url,
            trust_env=False,
            verify=url.startswith("https:"),
            limits=httpx.Limits(max_connections=None),
        )

    def close(self) -> None:
        self._client.close()

    def get(self, path: str, timeout_s: float) -> Any:
        return self._exchange("GET", path, None, timeout_s)

    def post(self, path: str, body: object, timeout_s: float) -> Any:
        return self._exchange("POST", path, msgspec.json.encode(body), timeout_s)

    def ok(self, path: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """Whether a GET is answered with 2xx in time."""
        try:
            return self._client.get(path, timeout=timeout_s).is_success
        except httpx.HTTPError:
            return False

    def answers(self, path: str) -> bool:
        """Whether a GET is answered at all, be it with an error."""
        try:
            self._client.get(path, timeout=PROBE_TIMEOUT_S)
        except httpx.HTTPError:
            return False
        return True

    def text(self, path: str, timeout_s: float) -> str:
        return self._send("GET", path, None, timeout_s).text

    def order(self, path: str, body: object, timeout_s: float) -> str:
        """A POST whose answer is no JSON, or nothing: its text."""
        return self._send("POST", path, msgspec.json.encode(body), timeout_s).text

    def _exchange(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Any:
        """The decoded JSON body; None where there is none. Raises a ServerFailure."""
        content = self._send(method, path, body, timeout_s).content
        try:
            return msgspec.json.decode(content) if content.strip() else None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadAnswer(f"{method} {path}: the body is not JSON: {error}") from error

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            answer = self._client.request(method, path, content=body, headers=headers, timeout=timeout)
        except httpx.ConnectError as error:
            raise Unreachable(f"{self.url}: {error}") from error
        except httpx.TimeoutException as error:
            raise ServerTimeout(
                f"{method} {path}: no answer within {timeout_s:g} s ({type(error).__name__})"
            ) from error
        except httpx.RemoteProtocolError as error:
            # Cut off in the middle, not HTTP, or closed before an answer: the caller asks whether it still lives.
            raise BadAnswer(f"{method} {path}: {error}") from error
        except httpx.HTTPError as error:
            raise Unreachable(f"{method} {path}: {type(error).__name__}: {error}") from error
        if not answer.is_success:
            raise ServerRefused(answer.status_code, _complaint(answer))
        return answer


class _Complaint(msgspec.Struct):
    """Errors as the servers write them: {"error": "..."}, {"error": {"message": "..."}}, {"message": "..."}."""

    error: str | dict[str, Any] | None = None
    message: str | None = None
    detail: Any = None


def _complaint(answer: httpx.Response) -> str:
    try:
        body = msgspec.json.decode(answer.content, type=_Complaint)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return answer.text[:MESSAGE_CHARS_MAX] or answer.reason_phrase
    said = body.error.get("message") if isinstance(body.error, dict) else body.error
    return str(said or body.message or body.detail or answer.reason_phrase)[:MESSAGE_CHARS_MAX]
