"""A story in the terminal: a line a turn, superseded branches dim and off to the side of the live one."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from replay.timeline.model import Action, Generation, Incident, Note, Recovery, Story
from replay.timeline.words import (
    command_of,
    failed,
    figures,
    headline,
    lost,
    mark_of,
    one_line,
    outcome,
    recovered,
    seconds,
    since,
)

_LIVE, _SUPERSEDED = "│  ", "  ╎"
_TIME, _NUMBER, _TOOK = 9, 4, 9
_TOKENS, _OUTCOME = 10, 11
_WIDE = 110
"""In a narrower terminal the model's tokens and time are left out, for the commands' sake."""


def show(story: Story, console: Console) -> None:
    """Print the story."""
    title = Text(f"\n{story.name} ", "bold")
    console.print(title.append(headline(story), "bold green" if story.ending == "finished" else "bold yellow"))
    if told := lost(story):
        console.print(Text(told))
    if story.task and story.task != story.name:
        console.print(Text(one_line(story.task, console.width - 1), "dim"))
    console.print(_figures(story))
    console.print(Text("\n" + _legend(), "dim"))
    for line in _lines(story, console.width):
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)


def _legend() -> str:
    return "│ the live branch   ╎ superseded   ✗ failure   ↺ recovery   ◆ checkpoint   ◇ nothing new   ◈ restored later"


def _figures(story: Story) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim")
    for name, value, remark in figures(story):
        style = "bold red" if name == "audit" and story.findings else "bold"
        table.add_row(name, Text(value, style), Text(remark, "dim"))
    return table


def _lines(story: Story, width: int) -> Iterator[Text]:
    """A turn is the generation and the action right after it: one line."""
    waiting: Generation | None = None
    for item in story.items:
        if isinstance(item, Action):
            yield _turn(story, waiting, item, width)
            waiting = None
            continue
        if waiting is not None:
            yield _turn(story, waiting, None, width)
            waiting = None
        match item:
            case Generation():
                waiting = item
            case Note():
                yield _line(since(story, item.time_ns), Text("■  ", "bold"), Text(item.text, "bold"))
            case Incident():
                yield _failure(story, item)
            case Recovery():
                yield _recovery(story, item)
    if waiting is not None:
        yield _turn(story, waiting, None, width)


def _line(time: str, rail: Text, rest: Text) -> Text:
    return Text(f"{time:>{_TIME}} ", "dim").append(rail).append(" ").append(rest)


def _turn(story: Story, generation: Generation | None, action: Action | None, width: int) -> Text:
    first = action if generation is None else generation
    assert first is not None
    gone = first.superseded_by is not None
    right = (_model(generation) if width >= _WIDE else Text()).append(_environment(action))
    room = max(12, width - _TIME - _NUMBER - 6 - len(right))
    number = f"{action.number if action is not None else '':>{_NUMBER}} "
    rest = Text(number, "dim").append(f"{_what(generation, action, room):<{room}}").append(right)
    rail = Text(_SUPERSEDED if gone else _LIVE, "dim" if gone else "green")
    line = _line(since(story, first.start_ns), rail, rest)
    if gone:
        line.stylize("dim")
    return line


def _what(generation: Generation | None, action: Action | None, room: int) -> str:
    if action is not None:
        return one_line(command_of(action), room)
    assert generation is not None
    if len(generation.engines) > 1:
        _, offset, incarnation = generation.engines[-1]
        return one_line(f"generation {generation.number}, resumed after token {offset} on {incarnation}", room)
    cut = "" if generation.end_ns is not None else ", cut off"
    return one_line(f"generation {generation.number}{cut}", room)


def _model(generation: Generation | None) -> Text:
    if generation is None:
        return Text(" " * (_TOKENS + _TOOK))
    took = "" if generation.end_ns is None else seconds((generation.end_ns - generation.start_ns) / 1e9)
    return Text(f"{generation.tokens:>{_TOKENS - 4}} tok{took:>{_TOOK}}", "blue")


def _environment(action: Action | None) -> Text:
    if action is None:
        return Text(" " * (_OUTCOME + _TOOK + 2))
    status = outcome(action)
    took = "" if action.end_ns is None else seconds(action.duration_s)
    text = Text(f"{status:>{_OUTCOME}}", "" if status == "exit 0" else "yellow").append(f"{took:>{_TOOK}}", "cyan")
    marks = {"restored": " ◈", "published": " ◆", "extended": " ◇", "discarded": "  "}
    mark = "  " if action.checkpoint is None else marks[mark_of(action.checkpoint)]
    return text.append(mark, "magenta")


def _failure(story: Story, item: Incident) -> Text:
    bad = item.hit and item.kind != "rewind"
    text = Text(failed(item), "bold red" if bad else "yellow").append(f"  {one_line(item.evidence, 200)}", "")
    return _line(since(story, item.detected_ns), Text("✗  ", "bold red" if bad else "yellow"), text)


def _recovery(story: Story, item: Recovery) -> Text:
    outage_s = item.incident.outage_s
    text = Text(f"after {seconds(outage_s)}: " if outage_s else "", "bold green")
    return _line(since(story, item.time_ns), Text("↺  ", "bold green"), text.append(recovered(item.incident), "green"))
