"""The chat page at `/`: one static file that asks nobody but the server it came from."""

from functools import cache
from importlib.resources import files

__all__ = ["PAGE_HEADERS", "page"]

# Nothing from elsewhere is loaded, asked or sent to, and no other site shows the page in a frame.
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def page() -> str:
    """The HTML of the page."""
    return files("k3lib.server").joinpath("page.html").read_text(encoding="utf-8")
