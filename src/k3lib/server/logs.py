"""Log lines of the server: text for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

__all__ = ["JsonFormatter", "LogFormat", "TextFormatter", "configure_logs"]

LogFormat = Literal["text", "json"]


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _shown(value: object) -> str:
    """A value as one word: a path may hold a line break that would look like another line of the log."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


class TextFormatter(logging.Formatter):
    """A line for people, its fields at the end."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        text = super().format(record)
        fields = " ".join(f"{key}={_shown(value)}" for key, value in _fields(record).items())
        return f"{text} {fields}" if fields else text


class JsonFormatter(logging.Formatter):
    """A line for programs."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        item = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            item["exception"] = self.formatException(record.exc_info)
        return json.dumps(item, ensure_ascii=False, default=str)


def configure_logs(level: str, form: LogFormat = "text") -> None:
    """Send log lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
