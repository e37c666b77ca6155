"""Fetching what a stranger's URL names: from known hosts, at public addresses, bounded in size and time."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3lib.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["download", "is_public"]

MAX_REDIRECTS = 3

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CHUNK = 1 << 16
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close", "User-Agent": "k3lib"}


def download(
    url: str,
    *,
    hosts: Sequence[str],
    max_bytes: int,
    timeout: float,
    deadline: float,
    allow_private: bool = False,
    param: str | None = None,
) -> bytes:
    """Fetch what a URL names.

    Every hop of a redirect obeys the same rules. The address that was judged is the one that is connected to, so that
    a name that changes between the two gains nothing. Proxies of the environment are not used.

    Args:
        url: of scheme http or https.
        hosts: what may be asked: `example.org`, `*.example.org` for names below it, `*` for all; `example.org:8443`
            for a port that is not the scheme's own.
        max_bytes: upper bound of the answer.
        timeout: seconds, as errors tell them.
        deadline: when they are over, on the monotonic clock.
        allow_private: addresses may be private ones.
        param: the field that errors name.

    Raises:
        RequestError: the URL breaks a rule, or its host did not send what was asked in time.
    """
    with _client_errors(url, timeout, deadline, param):
        for _ in range(MAX_REDIRECTS + 1):
            place = _Place.of(url)
            place.check(hosts)
            connection = _Connection(place, place.address(allow_private), deadline)
            with connection.until(deadline):
                connection.request("GET", place.path, headers=_HEADERS)
                response = connection.getresponse()
                if response.status not in _REDIRECTS:
                    return _body(response, max_bytes)
                url = urllib.parse.urljoin(url, response.headers.get("location", ""))
        raise ValueError(f"more than {MAX_REDIRECTS} redirects")


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the open internet; one that wraps an IPv4 address counts as not."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.sixtofour is not None:
        return False  # stands for any IPv4 address
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a URL points."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> _Place:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in _PORTS:
            raise ValueError(f"its scheme is {parts.scheme[:20]!r}, not http or https")
        if parts.username is not None or parts.password is not None:
            raise ValueError("it carries a user name")
        if not parts.hostname:
            raise ValueError("it names no host")
        host = parts.hostname.rstrip(".")
        if not host.isascii():
            host = host.encode("idna").decode()
        path = urllib.parse.quote(parts.path or "/", safe="/%:=&~+!$,;'@()*[]")
        query = "?" + urllib.parse.quote(parts.query, safe="/%:=&~+!$,;'@()*[]?") if parts.query else ""
        return cls(parts.scheme, host, parts.port or _PORTS[parts.scheme], path + query)

    def check(self, hosts: Sequence[str]) -> None:
        """Refuse a host that the server does not name."""
        for entry in hosts:
            name, port = _host_and_port(entry)
            if self.port != (port or _PORTS[self.scheme]):
                continue
            if name in ("*", self.host) or (name.startswith("*.") and self.host.endswith(name[1:])):
                return
        raise ValueError(f"this server fetches nothing from {self.host[:80]!r}, port {self.port}")

    def address(self, allow_private: bool) -> str:
        """The address to connect to; all that the name has must be allowed."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{self.host[:80]!r} has no address") from error
        addresses = [str(entry[4][0]) for entry in found]
        if not allow_private and not all(is_public(address) for address in addresses):
            raise ValueError(f"{self.host[:80]!r} is not at a public address")
        return addresses[0]


def _host_and_port(entry: str) -> tuple[str, int | None]:
    name, colon, port = entry.lower().rpartition(":")
    if colon and port.isdigit() and not (":" in name and not name.endswith("]")):
        return name.strip("[]"), int(port)
    return entry.lower().strip("[]"), None


class _Connection(http.client.HTTPConnection):
    """A connection to an address that was judged, under the name that the URL has."""

    def __init__(self, place: _Place, address: str, deadline: float) -> None:
        super().__init__(place.host, place.port, timeout=max(deadline - time.monotonic(), 0.001))
        self._address = address
        self._context = ssl.create_default_context() if place.scheme == "https" else None
        self._wire: socket.socket | None = None

    def connect(self) -> None:
        """Connect, and shake hands if the scheme asks for it."""
        self.sock = self._wire = socket.create_connection((self._address, self.port), self.timeout)
        if self._context is not None:
            secured = self._context.wrap_socket(self._wire, server_hostname=self.host, do_handshake_on_connect=False)
            self.sock = self._wire = secured
            secured.do_handshake()

    @contextlib.contextmanager
    def until(self, deadline: float) -> Iterator[None]:
        """Cut the wire at the deadline: a timeout of a socket starts anew with every byte that comes."""
        timer = threading.Timer(max(deadline - time.monotonic(), 0), self._cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.close()

    def _cut(self) -> None:
        if self._wire is not None:
            with contextlib.suppress(OSError):
                # not the method of an SSL socket, which would first wait for the other side
                socket.socket.shutdown(self._wire, socket.SHUT_RDWR)


def _body(response: http.client.HTTPResponse, max_bytes: int) -> bytes:
    if response.status != 200:
        raise ValueError(f"its host answered {response.status}")
    announced = response.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > max_bytes:
        raise ValueError(f"it has {int(announced):,} bytes, the limit is {max_bytes:,}")
    body = bytearray()
    while chunk := response.read(_CHUNK):
        body += chunk
        if len(body) > max_bytes:
            raise ValueError(f"it has more than {max_bytes:,} bytes, the limit of this server")
    return bytes(body)


@contextlib.contextmanager
def _client_errors(url: str, timeout: float, deadline: float, param: str | None) -> Iterator[None]:
    """Say of every failure which URL it was."""
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException) as error:
        late = time.monotonic() >= deadline
        why = f"it took longer than {timeout:g} s" if late else str(error) or type(error).__name__
        raise RequestError(f"{param}: cannot fetch {url[:80]!r}: {why}", param=param) from error
    else:
        if time.monotonic() >= deadline:
            raise RequestError(f"{param}: cannot fetch {url[:80]!r}: it took longer than {timeout:g} s", param=param)
