"""JSON in and out, by compiled parsers."""

from __future__ import annotations

import json
from typing import Any

import orjson
from pydantic_core import from_json

__all__ = ["dump", "load"]


def load(data: bytes) -> Any:  # noqa: ANN401
    """Parse JSON.

    NaN and infinities pass, so that the field that has them can be named; half a surrogate pair passes as well: clients
    cut texts in the middle of characters.

    Raises:
        json.JSONDecodeError: it is no JSON, is nested too deeply, or is not UTF-8.
    """
    try:
        return from_json(data)
    except ValueError as error:
        why = str(error)
    try:
        return json.loads(data)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise json.JSONDecodeError(why, "", 0) from error


def dump(value: Any) -> bytes:  # noqa: ANN401
    """Write JSON; what is not finite becomes null."""
    try:
        return orjson.dumps(value)
    except TypeError:  # half a surrogate pair, or an integer beyond 64 bits
        return json.dumps(value).encode()
