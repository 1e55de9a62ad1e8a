"""Where the metrics are: a file, standard input, or the user's own server, within limits.

Nothing is read without a limit of size, and nothing from a server without a limit of time.
"""

from __future__ import annotations

import http.client
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import SplitResult, urljoin, urlsplit

from vllm_eagle3_patch.ground.errors import PatchError
from vllm_eagle3_patch.ground.text import one_line

if TYPE_CHECKING:
    from typing import BinaryIO

SIZE_LIMIT = 64 * 1024 * 1024
"""Bytes of one scrape. A server with eight engines gives some hundred thousand."""

TIME_LIMIT = 10.0
"""Seconds that a server has for everything, from the look-up of its name to its last byte."""

REDIRECTS = 5

STANDARD_INPUT = "-"

_SCHEMES = ("http", "https")
_MOVED = (301, 302, 303, 307, 308)
_ACCEPT = "text/plain; version=0.0.4, */*;q=0.1"
_SAVE = "save the page that /metrics gives (curl -s URL -o FILE) and name the file instead"


class MetricsError(PatchError):
    """The metrics that were named cannot be read, or are not what vLLM writes."""

    exit_code: ClassVar[int] = 2
    default_code: ClassVar[str] = "metrics"


def read_source(source: str, timeout: float = TIME_LIMIT) -> bytes:
    """The bytes of one scrape.

    Args:
        source: A path, ``-`` for standard input, or an http or https URL. A URL without a path
            is asked for ``/metrics``, where vLLM serves them
            (vllm/entrypoints/openai/api_server.py, 0.9.2).
        timeout: Seconds that a server has. Files and standard input have no limit of time.

    Raises:
        MetricsError: It cannot be read, or is larger than ``SIZE_LIMIT``.
    """
    if source == STANDARD_INPUT:
        if sys.stdin is None:
            raise MetricsError("there is no standard input", "name a file or a URL", "unreadable")
        return _read(sys.stdin.buffer, "standard input")
    if is_url(source):
        return _within(timeout, source)
    if "://" in source:
        scheme = one_line(source.partition("://")[0])
        message = f"{scheme}: is no kind of address that metrics are read from"
        raise MetricsError(message, "give an http or https URL, a file, or -", "metrics-address")
    try:
        with Path(source).open("rb") as stream:
            return _read(stream, one_line(source))
    except (OSError, ValueError) as error:  # A NUL in a path is a ValueError.
        why = getattr(error, "strerror", None) or str(error)
        message = f"cannot read {one_line(source)}: {why}"
        hint = "give the file that holds the page of /metrics, its URL, or -"
        raise MetricsError(message, hint, "unreadable") from error


def is_url(source: str) -> bool:
    """Whether a source is fetched from a server."""
    return source.lower().startswith(tuple(f"{scheme}://" for scheme in _SCHEMES))


def with_path(url: str) -> str:
    """A URL as it is asked for: that of a server alone stands for its ``/metrics``."""
    parts = urlsplit(url)
    return parts._replace(path="/metrics").geturl() if parts.path in ("", "/") else url


def _read(stream: BinaryIO, name: str) -> bytes:
    try:
        content = stream.read(SIZE_LIMIT + 1)
    except OSError as error:
        why = error.strerror or str(error)
        hint = "give the file that holds the page of /metrics, its URL, or -"
        raise MetricsError(f"cannot read {name}: {why}", hint, "unreadable") from error
    return _limited(content, name)


def _limited(content: bytes, name: str) -> bytes:
    if len(content) > SIZE_LIMIT:
        raise MetricsError(
            f"{name} is larger than {SIZE_LIMIT // 1024 // 1024} MiB",
            "give one scrape of one server; grep spec_decode_ keeps what is read here",
            "metrics-too-large",
        )
    return content


def _within(timeout: float, url: str) -> bytes:
    """Fetch a URL; a server that sends a byte now and then does not get longer for it."""
    got: list[bytes | BaseException] = []

    def fetch() -> None:
        try:
            got.append(_fetch(url, timeout))
        except Exception as error:
            got.append(error)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(timeout)
    answer = got[0] if got else TimeoutError()
    if isinstance(answer, bytes):
        return answer
    if isinstance(answer, MetricsError):
        raise answer
    if isinstance(answer, TimeoutError):
        message = f"{_shown(url)} did not answer in full within {timeout:g} seconds"
        hint = f"see whether the server is up, or {_SAVE}"
        raise MetricsError(message, hint, "metrics-unreachable") from None
    if isinstance(answer, OSError | http.client.HTTPException | ValueError):
        why = getattr(answer, "strerror", None) or str(answer) or type(answer).__name__
        message = f"cannot read {_shown(url)}: {one_line(why)}"
        hint = f"see whether the server is up and the port is right, or {_SAVE}"
        raise MetricsError(message, hint, "metrics-unreachable") from None
    raise answer


def _fetch(url: str, timeout: float) -> bytes:
    """Follow redirects to http and https only, never to a file."""
    parts = _checked(with_path(url))
    for _ in range(REDIRECTS + 1):
        answer = _get(parts, timeout)
        if isinstance(answer, bytes):
            return answer
        parts = _checked(urljoin(parts.geturl(), answer))
    message = f"{_shown(url)} redirects more than {REDIRECTS} times"
    raise MetricsError(message, "give the URL that it leads to in the end", "metrics-unreachable")


def _checked(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme.lower() not in _SCHEMES:
        message = f"the server redirects to an address of the kind {one_line(parts.scheme)}:"
        raise MetricsError(
            message, f"give the URL of /metrics itself, or {_SAVE}", "metrics-address"
        )
    if parts.username is not None or parts.password is not None:
        message = f"{_shown(url)}: a name or password in a URL is not used here"
        raise MetricsError(message, _SAVE, "metrics-address")
    if not parts.hostname:
        message = f"{_shown(url)} names no server"
        raise MetricsError(message, "give a URL such as http://localhost:8000/metrics")
    return parts


def _get(parts: SplitResult, timeout: float) -> bytes | str:
    """The body of an answer, or where it redirects to."""
    secure = parts.scheme.lower() == "https"
    kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    name = _shown(parts.geturl())
    # An answer that ends with its connection has taken the socket over: it is closed by itself.
    with closing(connection):
        target = parts._replace(scheme="", netloc="", fragment="").geturl()
        connection.request("GET", target, headers={"Accept": _ACCEPT})
        with connection.getresponse() as answer:
            where = answer.getheader("Location")
            if answer.status in _MOVED and where:
                return where
            if answer.status != http.client.OK:
                message = f"{name} answered {answer.status} {one_line(answer.reason)}".rstrip()
                hint = f"give the URL of vLLM's own /metrics, or {_SAVE}"
                raise MetricsError(message, hint, "metrics-unreachable")
            content = answer.read(SIZE_LIMIT + 1)
            expected = answer.length  # What the header promised and did not come.
    if expected and len(content) <= SIZE_LIMIT:
        message = f"{name} ended {expected} bytes too early"
        raise MetricsError(message, "take the scrape again", "metrics-truncated")
    return _limited(content, name)


def _shown(url: str) -> str:
    """A URL as it may be printed: without a name and a password."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return one_line(f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}")
