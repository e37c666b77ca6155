"""Server-sent events."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from starlette.responses import Response

from k3lib.errors import RequestError
from k3lib.server.failures import ClientGone, EngineError, describe
from k3lib.server.fast_json import dump

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from starlette.types import Receive, Scope, Send

__all__ = ["event", "json_answer", "stream"]


def event(item: Mapping[str, object]) -> bytes:
    """One event."""
    return b"data: %b\n\n" % dump(item)


def json_answer(item: object, rid: str | None = None) -> Response:
    """A whole response."""
    return Response(dump(item), headers={"x-request-id": rid} if rid else None, media_type="application/json")


async def stream(events: AsyncGenerator[bytes, None], rid: str) -> Response:
    """Wait for the first event, so that an early failure still has its own status code."""
    return _EventStream(await anext(events), events, rid)


class _EventStream(Response):
    """A stream of events.

    Not starlette's StreamingResponse: it leaves the generator open when the client is gone, and then the
    engine would go on.
    """

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], rid: str) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", "x-request-id": rid})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events), contextlib.aclosing(self._framed()) as framed:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with contextlib.suppress(ClientGone, OSError):
                async for text in framed:
                    await send({"type": "http.response.body", "body": text, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _framed(self) -> AsyncGenerator[bytes, None]:
        yield self._first
        try:
            async for text in self._events:
                yield text
        except (RequestError, EngineError) as error:
            _, body = describe(error)
            yield event(body)
        yield b"data: [DONE]\n\n"
