"""Words for the generators, and the line between what is trained on and what is held out."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import random

__all__ = ["Split", "Words", "is_held_out"]

Split = Literal["train", "held_out"]

_ALWAYS_HELD_OUT = frozenset({"Beijing", "15%240"})  # of the examples in the documentation
_ONSETS = "b c d f g h j k l m n p r s t v w z br ch dr fl gr kl pr sh st th tr".split()
_VOWELS = "a e i o u ai ea io ou".split()
_CODAS = ["", "", "", "n", "r", "s", "l", "m", "t", "k", "nd", "x"]

_CITIES = (
    "Paris London Berlin Madrid Rome Vienna Oslo Prague Lisbon Dublin Athens Warsaw Tokyo Osaka Kyoto Seoul Beijing "
    "Shanghai Delhi Mumbai Cairo Lagos Nairobi Sydney Perth Toronto Boston Chicago Denver Seattle Lima Bogota Santiago "
    "Havana Quito Geneva Zurich Milan Naples Porto Munich Hamburg Krakow Riga Tallinn Helsinki Bergen Malmo"
).split()
_PEOPLE = (
    "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jana Kai Lena Mira Nico Olga Pia Quinn Rosa Sam Tara Uma Vera Will Xena "
    "Yuri Zoe Anna Bob Carl Dora Emil Fay Gina Hugo Ida Jack Kim Leo Mona Nina Otto Paul Rita Sven Tom Ute Vic Wanda"
).split()
COLORS = "red green blue yellow black white pink orange purple brown gray cyan".split()
ANIMALS = "cat dog horse bird fish rabbit turtle fox owl bear".split()
FOODS = "rice soup bread pasta salad pizza cake apples beans curry".split()
THINGS = "apples books coins cards pens eggs stones cups keys stamps".split()


def is_held_out(key: str) -> bool:
    """Whether a word, a sum, an image or a set of arguments belongs to the held-out eighth."""
    return key in _ALWAYS_HELD_OUT or zlib.crc32(key.encode()) % 8 == 0


class Words:
    """Draws from one split: nothing that comes out here for "train" comes out for "held_out"."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.wants = split == "held_out"

    def mine(self, key: str) -> bool:
        """Whether this split may use `key`."""
        return is_held_out(key) == self.wants

    def made_up(self, syllables: tuple[int, int] = (2, 3)) -> str:
        """A word that is in no dictionary, in lower case."""
        while True:
            parts = [self.rng.choice(_ONSETS) + self.rng.choice(_VOWELS) for _ in range(self.rng.randint(*syllables))]
            word = "".join(parts) + self.rng.choice(_CODAS)
            if self.mine(word):
                return word

    def _known(self, words: list[str]) -> str | None:
        word = self.rng.choice(words)
        return word if self.mine(word) else None

    def city(self) -> str:
        """A city, mostly one that does not exist."""
        known = self._known(_CITIES) if self.rng.random() < 0.35 else None
        return known or self._proper()

    def person(self) -> str:
        """A first name."""
        known = self._known(_PEOPLE) if self.rng.random() < 0.35 else None
        return known or self._proper()

    def _proper(self) -> str:
        while True:
            word = self.made_up().capitalize()
            if self.mine(word):
                return word

    def distinct(self, make: str, count: int) -> list[str]:
        """Several different words of one kind."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[getattr(self, make)()] = None
        return list(found)
