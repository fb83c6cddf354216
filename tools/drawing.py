"""Boxes, arrows and words as SVG: what the pictures of `docs/how` are made of."""

from dataclasses import dataclass, field
from html import escape

BLUE, ORANGE, GREEN, GREY, WHITE = "#7aa6d8", "#f0a860", "#86c28b", "#d9d9d9", "#ffffff"
_INK = "#333333"
_FONT = "font-family='sans-serif' font-size='13'"


@dataclass(slots=True)
class Drawing:
    """A picture of so many pixels, on white: it is read on a dark page, too.

    title: what it shows, for who cannot see it.
    """

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, height: int, words: str = "", fill: str = WHITE) -> None:
        """With its words in the middle."""
        self.parts.append(
            f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='3' fill='{fill}' stroke='{_INK}'/>"
        )
        if words:
            self.words(x + width // 2, y + height // 2 + 4, words, "middle")

    def words(self, x: int, y: int, words: str, anchor: str = "start", *, bold: bool = False) -> None:
        """anchor: `start`, `middle` or `end` of the words lies at x."""
        weight = " font-weight='bold'" if bold else ""
        self.parts.append(
            f"<text x='{x}' y='{y}' {_FONT}{weight} fill='{_INK}' text-anchor='{anchor}'>{escape(words)}</text>"
        )

    def line(self, x: int, y: int, to_x: int, to_y: int, *, dashed: bool = False) -> None:
        dashes = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(f"<line x1='{x}' y1='{y}' x2='{to_x}' y2='{to_y}' stroke='{_INK}'{dashes}/>")

    def arrow(self, x: int, y: int, to_x: int, to_y: int, words: str = "", *, dashed: bool = False) -> None:
        """With its words above the middle of it."""
        dashes = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(
            f"<line x1='{x}' y1='{y}' x2='{to_x}' y2='{to_y}' stroke='{_INK}' marker-end='url(#head)'{dashes}/>"
        )
        if words:
            self.words((x + to_x) // 2, (y + to_y) // 2 - 6, words, "middle")

    def svg(self) -> str:
        head = (
            "<marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='8' markerHeight='8' orient='auto'>"
            f"<path d='M0 0 L10 5 L0 10 z' fill='{_INK}'/></marker>"
        )
        size = f"width='{self.width}' height='{self.height}' viewBox='0 0 {self.width} {self.height}'"
        return "\n".join(
            [
                f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img'>",
                f"<title>{escape(self.title)}</title>",
                f"<defs>{head}</defs>",
                f"<rect width='{self.width}' height='{self.height}' rx='6' fill='{WHITE}'/>",
                *self.parts,
                "</svg>\n",
            ]
        )
