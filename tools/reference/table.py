"""A table in Markdown, read alike by the site and by who reads the file."""

from collections.abc import Iterable, Sequence

WRITTEN = "Written by `make map` from {source}; `make check` compares.\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table with a line break after it. Cells are Markdown; `code` is for what has characters of its own."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(' '.join(cell.split()) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """As code, in a cell too. A stroke would end the cell, whatever it stands in."""
    if "|" not in text:
        return f"`{text}`"
    return f"<code>{text.replace('&', '&amp;').replace('<', '&lt;').replace('|', '&#124;')}</code>"


def prose(text: str) -> str:
    """A sentence of the source as a cell."""
    return text.replace("|", "&#124;").replace("<", "&lt;")
