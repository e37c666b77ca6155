"""A curve as a picture, with Pillow alone."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["draw_curve"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 800, 480, 70, 50


def draw_curve(points: Sequence[tuple[float, float]], file: Path, *, across: str, up: str) -> None:
    """Draw positive values over x, with a logarithmic vertical axis; nothing without Pillow or two points."""
    points = [(x, y) for x, y in points if y > 0 and math.isfinite(y)]
    if len(points) < 2 or find_spec("PIL") is None:
        return
    from PIL import Image, ImageDraw  # noqa: PLC0415 - optional

    low, high = min(math.log10(y) for _, y in points), max(math.log10(y) for _, y in points)
    low, high = math.floor(low * 4) / 4, max(math.ceil(high * 4) / 4, low + 0.25)
    most = max(x for x, _ in points)

    def place(x: float, log_y: float) -> tuple[float, float]:
        return (
            _LEFT + (_WIDTH - _LEFT - 20) * x / most,
            _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 20) * (log_y - low) / (high - low),
        )

    image = Image.new("RGB", (_WIDTH, _HEIGHT), "white")
    pen = ImageDraw.Draw(image)
    marks = round((high - low) * 4)
    for i in range(marks + 1):
        log_y = low + i / 4
        pen.line([place(0, log_y), place(most, log_y)], fill="#dddddd")
        pen.text((8, place(0, log_y)[1] - 6), f"{10**log_y:.3g}", fill="black")
    for i in range(6):
        x = most * i / 5
        pen.line([place(x, low), place(x, high)], fill="#eeeeee")
        pen.text((place(x, low)[0] - 10, _HEIGHT - _BOTTOM + 8), f"{x:.4g}", fill="black")
    pen.line([place(x, math.log10(y)) for x, y in points], fill="#1f5fbf", width=2)
    pen.text((_WIDTH // 2 - 40, _HEIGHT - 22), across, fill="black")
    pen.text((8, 4), up, fill="black")
    image.save(file)
