"""The way into the app: keys, size limits, shutting down, and one line in the log for each request."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from k3lib.server.failures import error_answer

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from k3lib.server.config import ApiConfig
    from k3lib.server.served import Served

__all__ = ["LOG", "Gate", "check_admin"]

logger = logging.getLogger(__name__)

# Probes and scrapers come often, and say nothing new in a log.
QUIET = frozenset({"/health", "/ready", "/metrics", "/health_generate"})
OPEN = frozenset({"/", "/health", "/ready"})  # a page has no secrets; what it asks for needs the key
LOG = "k3lib.log"  # key of the scope: what the app adds to the line
ADMIN = frozenset({"/flush_cache", "/update_weights"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Keys:
    """Compares the key of a request with the configured ones, in constant time."""

    def __init__(self, config: ApiConfig) -> None:
        key, admin = config.api_key, config.admin_api_key
        self._key = None if key is None else _digest(key.encode())
        self._admin = None if admin is None else _digest(admin.encode())

    def check(self, headers: Headers, path: str) -> bool:
        """Whether an operator asks.

        Raises:
            HTTPException: 401 for a key that is missing or wrong, 403 for one that does not suffice.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # starlette decodes headers as latin-1, whatever the client wrote
        given = _digest(token.strip().encode("latin-1") if scheme.lower() == "bearer" else b"")
        # both comparisons are always made
        is_user = self._key is not None and hmac.compare_digest(given, self._key)
        is_admin = self._admin is not None and hmac.compare_digest(given, self._admin)
        suffices = is_admin or self._admin is None
        wants_key = (self._key is not None and path not in OPEN) or (path in ADMIN and not suffices)
        if wants_key and not (is_user or is_admin):
            raise HTTPException(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", {"www-authenticate": "Bearer"}
            )
        if path in ADMIN and not suffices:
            raise HTTPException(403, f"{path} needs the admin key of this server")
        return suffices


def check_admin(http: Request) -> None:
    """Refuse a request that does not come from an operator."""
    if not http.scope["k3lib.is_admin"]:
        raise HTTPException(403, f"{http.url.path} with abort_all needs the admin key of this server")


class Gate:
    """ASGI middleware around the app."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app = app
        self._served = served
        self._keys = Keys(served.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, started, status = scope["path"], time.monotonic(), 0
        counts = path not in QUIET
        scope[LOG] = {}

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        if counts:
            self._served.enter()
        try:
            try:
                limited = self._admit(scope, receive)
            except HTTPException as error:
                await error_answer(error)(scope, receive, noted)
            else:
                await self._app(scope, limited, noted)
        finally:
            if counts:
                self._served.leave()
                _log(scope, status, time.monotonic() - started)

    def _admit(self, scope: Scope, receive: Receive) -> Receive:
        headers, path = Headers(scope=scope), scope["path"]
        scope["k3lib.is_admin"] = self._keys.check(headers, path)
        if self._served.is_draining and path not in QUIET:
            raise HTTPException(503, "the server is shutting down", {"connection": "close"})
        limit = self._served.config.max_body_bytes
        length = headers.get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        return _limited(receive, limit)


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {limit:,} bytes, the limit of this server")


def _limited(receive: Receive, limit: int) -> Receive:
    left = limit

    async def counted() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise _too_large(limit)
        return message

    return counted


def _log(scope: Scope, status: int, seconds: float) -> None:
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status or 500,
        "seconds": round(seconds, 4),
        **scope[LOG],
    }
    logger.info("request", extra={"fields": fields})
