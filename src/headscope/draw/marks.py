"""What a drawing is made of. Lengths are CSS pixels from the top left corner; colours are names that a palette gives.

Every format draws these marks and nothing else, so that no two formats can show different things.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

#: blue is positive and red negative, told apart by the colour-blind; `back` is exactly 0 on a scale
PALETTES = {
    "light": {"back": "#ffffff", "ink": "#1d2430", "soft": "#5d6878", "line": "#d9dee6", "up": "#2563c3", "down": "#be3c3c"},
    "dark": {"back": "#14181f", "ink": "#e6eaf0", "soft": "#98a3b3", "line": "#323a47", "up": "#6ea8ff", "down": "#ff8278"},
}  # fmt: skip
SIZE = 10.0  # of small text


@dataclass(frozen=True)
class Box:
    """A rectangle. `hint` is shown where the reader points at it."""

    x: float
    y: float
    width: float
    height: float
    fill: str | None = None
    opacity: float = 1.0
    stroke: str | None = None
    hint: str = ""

    def moved(self, dx: float, dy: float) -> Box:
        return replace(self, x=self.x + dx, y=self.y + dy)


@dataclass(frozen=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    stroke: str
    width: float = 1.0
    opacity: float = 1.0
    dashed: bool = False
    hint: str = ""

    def moved(self, dx: float, dy: float) -> Line:
        return replace(self, points=tuple((x + dx, y + dy) for x, y in self.points))


@dataclass(frozen=True)
class Dot:
    """A disc."""

    x: float
    y: float
    radius: float
    fill: str
    opacity: float = 1.0
    hint: str = ""

    def moved(self, dx: float, dy: float) -> Dot:
        return replace(self, x=self.x + dx, y=self.y + dy)


@dataclass(frozen=True)
class Words:
    """A line of text on its baseline; `turn` in degrees clockwise, `anchor`: start, middle or end."""

    x: float
    y: float
    text: str
    size: float = SIZE
    fill: str = "soft"
    anchor: str = "start"
    turn: float = 0.0
    bold: bool = False

    def moved(self, dx: float, dy: float) -> Words:
        return replace(self, x=self.x + dx, y=self.y + dy)


@dataclass(frozen=True)
class Picture:
    """Many cells as an image: `values` in -1…1 by rows from the top, NaN where there is none."""

    x: float
    y: float
    width: float
    height: float
    values: tuple[tuple[float, ...], ...]

    def moved(self, dx: float, dy: float) -> Picture:
        return replace(self, x=self.x + dx, y=self.y + dy)


Mark = Box | Line | Dot | Words | Picture


@dataclass
class Drawing:
    """Marks in the order in which they are painted. `left_out` says what the drawing does not show."""

    width: float
    height: float
    marks: list[Mark] = field(default_factory=list)
    left_out: str = ""

    def place(self, other: Drawing, x: float, y: float) -> None:
        """Paint another drawing at a place of this one, which grows to hold it."""
        self.marks += [mark.moved(x, y) for mark in other.marks]
        self.width = max(self.width, x + other.width)
        self.height = max(self.height, y + other.height)
        self.left_out = self.left_out or other.left_out


def visible(text: str) -> str:
    """Text on one line that shows what it holds: blanks, line ends, and the controls that would garble or break a file."""
    return "".join(map(_sign, text)) or "∅"


def _sign(letter: str) -> str:
    if letter in _SIGNS:
        return _SIGNS[letter]
    if letter < " " or letter == "\x7f":
        return chr(0x2400 + ord(letter)) if letter < " " else "␡"
    # half a pair, private or unassigned, or a mark that turns the direction of what follows
    return "�" if unicodedata.category(letter) in ("Cs", "Cc", "Cn") else "⊘" if letter in _TURNS else letter


_SIGNS = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}
_TURNS = frozenset("\u200e\u200f\u061c\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")


def plain(text: str) -> str:
    """The same for text whose blanks are blanks."""
    return " ".join("" if not word else "".join(map(_sign, word)) for word in text.split(" "))


def cut(text: str, most: int) -> str:
    """At most `most` letters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def width_of(text: str, size: float = SIZE) -> float:
    """About how wide text is; fonts differ, so this is on the large side."""
    return size * sum(1.05 if unicodedata.east_asian_width(x) in "WF" else 0.6 for x in text)


def fitted(text: str, width: float, size: float = SIZE) -> str:
    """As much of the text as fits a width."""
    most = len(text)
    while most > 1 and width_of(cut(text, most), size) > width:
        most -= 1
    return cut(text, most)


def wrapped(text: str, width: float, size: float = SIZE) -> list[str]:
    """Lines that fit a width; a word longer than a line is broken."""
    lines = [""]
    for word in _pieces(text.split(), width, size):
        longer = f"{lines[-1]} {word}".strip()
        if width_of(longer, size) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _pieces(words: Iterable[str], width: float, size: float) -> Iterable[str]:
    most = max(1, int(width / (1.05 * size)))
    for word in words:
        if width_of(word, size) <= width:
            yield word
        else:
            yield from (word[i : i + most] for i in range(0, len(word), most))
