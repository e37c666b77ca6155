"""Small pictures with an answer: coloured shapes, several of them, digits. Drawn with numpy alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from training.model import IMAGE_SIDES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from training.words import Words

__all__ = ["COLOURS", "SHAPES", "Picture", "draw_digit", "draw_shapes"]

COLOURS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 210, 50),
    "black": (20, 20, 20), "white": (245, 245, 245), "orange": (245, 140, 30), "purple": (140, 50, 170),
}  # fmt: skip
CELL = 28  # pixels a side of what becomes one token: two by two patches of 14
SHAPES = ("circle", "square", "triangle", "cross")
_DIGITS = (  # five columns, seven rows
    "01110100011001110101110011000101110", "00100011000010000100001000010001110",
    "01110100010000100010001000100011111", "11111000100010000010000011000101110",
    "00010001100101010010111110001000010", "11111100001111000001000011000101110",
    "00110010001000011110100011000101110", "11111000010001000100010000100001000",
    "01110100011000101110100011000101110", "01110100011000101111000010001001100",
)  # fmt: skip


class Picture(NamedTuple):
    """`pixels [side, side, 3]` uint8, and what is to be seen."""

    pixels: NDArray[np.uint8]
    facts: dict[str, Any]


def _mask(shape: str, side: int, x: int, y: int, radius: int) -> NDArray[np.bool_]:
    columns, rows = np.meshgrid(np.arange(side) - x, np.arange(side) - y)
    if shape == "circle":
        return columns**2 + rows**2 <= radius**2
    inside = (abs(columns) <= radius) & (abs(rows) <= radius)
    if shape == "square":
        return inside
    if shape == "triangle":
        return inside & (2 * abs(columns) <= rows + radius)
    width = max(1, radius // 3)
    return inside & ((abs(columns) <= width) | (abs(rows) <= width))


def _canvas(side: int, background: str) -> NDArray[np.int64]:
    canvas = np.empty((side, side, 3), np.int64)
    canvas[:] = COLOURS[background]
    return canvas


def _finish(words: Words, canvas: NDArray[np.int64], facts: dict[str, Any]) -> Picture:
    noise = np.random.Generator(np.random.PCG64(words.rng.getrandbits(63))).integers(-12, 13, canvas.shape)
    return Picture((canvas + noise).clip(0, 255).astype(np.uint8), facts)


def draw_shapes(words: Words, count: int) -> Picture:
    """One to five equal shapes in one colour: one about the middle, several each in a cell of its own.

    A cell is as large as what becomes one token, 28 pixels: large enough to tell a shape, wherever it is.
    """
    rng = words.rng
    while True:
        side = rng.choice(IMAGE_SIDES) if count < 4 else IMAGE_SIDES[-1]
        shape, (colour, background) = rng.choice(SHAPES), rng.sample(sorted(COLOURS), 2)
        if count == 1:
            radius, away = rng.randint(side // 5, side // 3), side // 8
            places = [tuple(side // 2 + rng.randint(-away, away) for _ in "xy")]
        else:
            radius, across = rng.randint(CELL // 4, CELL // 2 - 2), side // CELL
            slack = CELL // 2 - 1 - radius
            places = [
                tuple(
                    CELL * part + CELL // 2 + rng.randint(-slack, slack) for part in (index % across, index // across)
                )
                for index in rng.sample(range(across * across), count)
            ]
        if words.mine(f"{shape} {colour} on {background} {side} {radius} {places}"):
            break
    canvas = _canvas(side, background)
    for x, y in places:
        canvas[_mask(shape, side, x, y, radius)] = COLOURS[colour]
    return _finish(words, canvas, {"shape": shape, "colour": colour, "background": background, "count": count})


def draw_digit(words: Words) -> Picture:
    """One digit of a five by seven font, scaled, about the middle."""
    rng = words.rng
    while True:
        side = rng.choice(IMAGE_SIDES)
        digit, (colour, background) = rng.randrange(10), rng.sample(sorted(COLOURS), 2)
        scale = rng.randint(side // 10, side // 8)
        x, y = (max(0, min(side - size, (side - size) // 2 + rng.randint(-5, 5))) for size in (5 * scale, 7 * scale))
        if words.mine(f"digit {digit} {colour} on {background} {side} {scale} {x} {y}"):
            break
    canvas = _canvas(side, background)
    glyph = np.array([c == "1" for c in _DIGITS[digit]]).reshape(7, 5).repeat(scale, 0).repeat(scale, 1)
    canvas[y : y + 7 * scale, x : x + 5 * scale][glyph] = COLOURS[colour]
    return _finish(words, canvas, {"digit": digit, "colour": colour, "background": background})
