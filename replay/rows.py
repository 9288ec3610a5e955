"""Rows under named columns, at any width: where a terminal is too narrow for a table, each row is several lines.

Nothing is ever cut. What identifies a thing or is a number stays on one line; only columns marked as prose are wrapped,
and headings where that saves the table.
"""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_LEAST_PROSE = 18


class Rows:
    """A renderable. A column's name begins with `>` for numbers (to the right) and with `~` for prose (may wrap)."""

    def __init__(self, *columns: str, title: str = "") -> None:
        self._columns = columns
        self._title = title
        self._rows: list[tuple[Text, ...]] = []

    def add(self, *cells: str | Text) -> None:
        """A row: a cell for each column."""
        self._rows.append(tuple(cell if isinstance(cell, Text) else Text(cell) for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._title:
            yield Text(self._title, "bold")
        for heading_on_one_line, gap in ((True, 2), (False, 2), (False, 1)):
            widths = [self._width(place, heading_on_one_line) for place in range(len(self._columns))]
            prose = sum(width is None for width in widths)
            needed = sum(width or _LEAST_PROSE for width in widths) + gap * (len(widths) - 1)
            if needed <= options.max_width:
                yield self._table(widths, gap, options.max_width if prose else needed)
                return
        yield from self._records()

    def _width(self, place: int, heading_on_one_line: bool) -> int | None:
        """The column's fixed width; None for prose longer than the least."""
        name = self._columns[place]
        widest = max((row[place].cell_len for row in self._rows), default=0)
        if name.startswith("~") and widest > _LEAST_PROSE:
            return None
        heading = Text(name.lstrip(">~"))
        return max(widest, heading.cell_len if heading_on_one_line else max(map(len, heading.plain.split())))

    def _table(self, widths: list[int | None], gap: int, width: int) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", width=width)
        for name, fixed in zip(self._columns, widths, strict=True):
            table.add_column(
                Text(name.lstrip(">~")),
                justify="right" if name.startswith(">") else "left",
                overflow="fold",
                width=fixed,
                ratio=1 if fixed is None else None,
            )
        for row in self._rows:
            table.add_row(*row)
        return table

    def _records(self) -> RenderResult:
        """The first cell as a heading, below it what the others say."""
        for first, *others in self._rows:
            yield first
            for name, cell in zip(self._columns[1:], others, strict=True):
                if cell:
                    yield Text.assemble((f"  {name.lstrip('>~')}: ", "dim"), cell)
