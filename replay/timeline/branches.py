"""A story as a list from top to bottom, a turn a row, with a rail beside it as a version history has: the live branch
runs straight down, a superseded one leaves it at its boundary and ends at the failure that ended it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from replay.timeline.model import Action, Generation, Incident, Item, Note, Recovery, Story
from replay.timeline.words import captured, command_of, failed, mark_of, one_line, outcome, recovered, seconds, since

_ROW = 30
_LIVE_X, _SIDE_X = 14, 32
_SHOWN = 110
_UNFOLDED = 4_000
"""Characters of a command that its row unfolds to; the journal has the rest."""


@dataclass
class _Row:
    """One line of the list. A turn is a generation and the action right after it."""

    item: Item
    generation: Generation | None = None
    action: Action | None = None

    @property
    def first(self) -> Generation | Action | None:
        return self.generation or self.action

    @property
    def superseded(self) -> bool:
        return self.first is not None and self.first.superseded_by is not None


def branches(story: Story) -> str:
    """The rows of the list, as HTML."""
    rows = list(_rows(story))
    return "".join(_html(story, rows, place) for place in range(len(rows)))


def _rows(story: Story) -> Iterator[_Row]:
    waiting: Generation | None = None
    for item in story.items:
        if isinstance(item, Action):
            yield _Row(item, waiting, item)
            waiting = None
            continue
        if waiting is not None:
            yield _Row(waiting, waiting)
            waiting = None
        if isinstance(item, Generation):
            waiting = item
        else:
            yield _Row(item)
    if waiting is not None:
        yield _Row(waiting, waiting)


def _html(story: Story, rows: list[_Row], place: int) -> str:
    row = rows[place]
    match row.item:
        case Note():
            kind, when, what = "note", row.item.time_ns, _plain(row.item.text)
        case Incident():
            kind, when = "failed" if row.item.hit else "elsewhere", row.item.detected_ns
            what = f"<strong>{escape(failed(row.item))}</strong> <span>{escape(row.item.evidence)}</span>"
        case Recovery():
            outage_s = row.item.incident.outage_s
            kind, when = "recovered", row.item.time_ns
            after = f"after {seconds(outage_s)}: " if outage_s else ""
            what = f"<strong>{after}</strong><span>{escape(recovered(row.item.incident))}</span>"
        case Generation() | Action():
            kind, when, what = "turn superseded" if row.superseded else "turn", row.item.start_ns, _turn(row)
            when = row.generation.start_ns if row.generation is not None else when
    side = " on-side" if _on_the_side(rows, place) and _on_the_side(rows, place + 1) else ""
    return (
        f'<li class="{kind}{side}"><span class="when">{since(story, when)}</span>{_rail(rows, place)}'
        f'<div class="what">{what}</div></li>'
    )


def _plain(text: str) -> str:
    return f"<strong>{escape(text)}</strong>"


def _turn(row: _Row) -> str:
    action, generation = row.action, row.generation
    number = "" if action is None else str(action.number)
    gone = '<span class="unseen">superseded</span>' if row.superseded else ""
    parts = [f'<span class="number">{gone}{number}</span>', _command(row)]
    if generation is not None:
        took = "" if generation.end_ns is None else seconds((generation.end_ns - generation.start_ns) / 1e9)
        parts.append(f'<span class="tokens">{generation.tokens} tok</span><span class="took model-text">{took}</span>')
    else:
        parts.append('<span class="tokens"></span><span class="took"></span>')
    if action is not None:
        status = outcome(action)
        odd = "" if status == "exit 0" else " odd"
        took = "" if action.end_ns is None else seconds(action.duration_s)
        parts.append(f'<span class="outcome{odd}">{status}</span><span class="took action-text">{took}</span>')
    else:
        parts.append('<span class="outcome"></span><span class="took"></span>')
    parts.append(f'<span class="badge">{_badge(action)}</span>')
    return "".join(parts)


def _command(row: _Row) -> str:
    if row.action is not None:
        text = command_of(row.action)
        short = escape(one_line(text, _SHOWN))
        if short == escape(text):
            return f'<code class="command">{short}</code>'
        more = len(text) - _UNFOLDED
        rest = f"\n… and {more:,} more characters" if more > 0 else ""
        whole = escape(text[:_UNFOLDED] + rest, quote=False)
        return f'<details class="command"><summary><code>{short}</code></summary><pre>{whole}</pre></details>'
    assert row.generation is not None
    if len(row.generation.engines) > 1:
        _, offset, incarnation = row.generation.engines[-1]
        return f'<em class="command">resumed after token {offset} on {escape(incarnation)}</em>'
    return f'<em class="command">generation {row.generation.number}{"" if row.generation.end_ns else ", cut off"}</em>'


def _badge(action: Action | None) -> str:
    if action is None or action.checkpoint is None:
        return ""
    mark = f'<path class="checkpoint {mark_of(action.checkpoint)}" d="M7 1l6 6-6 6-6-6z"/>'
    return f'<svg width="14" height="14" role="img"><title>{escape(captured(action.checkpoint))}</title>{mark}</svg>'


def _rail(rows: list[_Row], place: int) -> str:
    """The row's part of the rail. The lines down the page are the style sheet's: a row may be unfolded and grow."""
    row = rows[place]
    middle = _ROW / 2
    parts: list[str] = []
    before, here = _on_the_side(rows, place - 1), _on_the_side(rows, place)
    if here and not before:
        parts.append(f'<path class="side" d="M{_LIVE_X} 0C{_LIVE_X} 10,{_SIDE_X} 5,{_SIDE_X} {middle}"/>')
    elif here:
        parts.append(f'<line class="side" x1="{_SIDE_X}" x2="{_SIDE_X}" y1="0" y2="{middle}"/>')
    parts.append(_dot(row.item, _SIDE_X if here else _LIVE_X, middle))
    return f'<svg class="rail" width="46" height="{_ROW}" aria-hidden="true">{"".join(parts)}</svg>'


def _on_the_side(rows: list[_Row], place: int) -> bool:
    """Whether the row belongs to a superseded stretch: a superseded turn, what came between two of them, or its end."""
    if not 0 <= place < len(rows):
        return False
    row = rows[place]
    if row.first is not None:
        return row.superseded
    before = _nearest_turn(rows[place::-1])
    after = _nearest_turn(rows[place:])
    return before is not None and (before is after or before is row.item)


def _nearest_turn(rows: list[_Row]) -> Incident | None:
    """What superseded the first turn among the rows."""
    return next((row.first.superseded_by for row in rows if row.first is not None), None)


def _dot(item: Item, x: int, y: float) -> str:
    match item:
        case Incident():
            kind = "failure" if item.hit else "failure elsewhere"
            return (
                f'<g class="{kind}"><circle cx="{x}" cy="{y}" r="7"/><path d="M{x - 2.5} {y - 2.5}l5 5m0-5l-5 5"/></g>'
            )
        case Recovery():
            return f'<circle class="recovery-dot" cx="{x}" cy="{y}" r="6"/>'
        case Note():
            return f'<rect class="note-dot" x="{x - 5}" y="{y - 5}" width="10" height="10" rx="2"/>'
        case Generation() | Action():
            kind = "dot" if item.superseded_by is None else "dot gone"
            return f'<circle class="{kind}" cx="{x}" cy="{y}" r="4.5"/>'
