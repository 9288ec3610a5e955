"""The overview of a story as one SVG: what ran when, on a common time axis, with failures and recoveries across it."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from replay.timeline.model import Action, Generation, Incident, Life, Story
from replay.timeline.words import captured, command_of, failed, mark_of, one_line, outcome, plural, recovered, seconds

_LEFT, _RIGHT, _TOP = 84, 28, 30
_LANES = {"model": 40, "actions": 72, "sandbox": 110, "engine": 156}
_BAR = 20
_HEIGHT = 206
_WAITED_S = 0.05
"""What an action waited before it ran is shown from here on."""
_STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600)


def chart(story: Story) -> str:
    """The SVG element. Its width grows with what there is to see; the page scrolls it."""
    return _Chart(story).svg()


class _Chart:
    def __init__(self, story: Story) -> None:
        self._story = story
        self._span_s = max(story.duration_s, 1e-3)
        self._width = min(6000, max(1100, 6 * len(story.items)))

    def svg(self) -> str:
        story = self._story
        layers = [
            *self._axis(),
            *(part for incident in story.incidents for part in self._outage(incident)),
            *(part for name in _LANES for part in self._lane_name(name)),
            *(part for life in story.lives for part in self._life(life)),
            *(self._generation(one) for one in story.generations),
            *(self._action(one) for one in story.actions),
            *self._checkpoints(),
            *(part for incident in story.incidents for part in self._failure(incident)),
        ]
        label = f"What ran when in {plural(len(story.actions), 'action')}, on a time axis of {seconds(self._span_s)}"
        return (
            f'<svg class="chart" width="{self._width}" height="{_HEIGHT}" viewBox="0 0 {self._width} {_HEIGHT}" '
            f'role="img" aria-label="{escape(label)}">{_DEFINITIONS}{"".join(layers)}</svg>'
        )

    def _x(self, time_ns: int) -> float:
        share = (time_ns - self._story.start_ns) / 1e9 / self._span_s
        return round(_LEFT + min(1.0, max(0.0, share)) * (self._width - _LEFT - _RIGHT), 1)

    def _axis(self) -> Iterator[str]:
        wanted = self._span_s / (self._width / 90)
        step_s = next((step for step in _STEPS_S if step >= wanted), 7200)
        for tick in range(int(self._span_s / step_s) + 1):
            x = self._x(self._story.start_ns + int(tick * step_s * 1e9))
            label = _tick(tick * step_s, step_s)
            yield f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP - 6}" y2="{_HEIGHT - 8}"/>'
            yield f'<text class="tick" x="{x}" y="{_TOP - 12}">{label}</text>'

    def _lane_name(self, lane: str) -> Iterator[str]:
        yield f'<text class="lane" x="0" y="{_LANES[lane] + 14}">{lane}</text>'

    def _bar(self, lane: str, start_ns: int, end_ns: int, kind: str, title: str, least: float = 2.0) -> str:
        x = self._x(start_ns)
        width = max(least, round(self._x(end_ns) - x, 1))
        return (
            f'<rect class="{kind}" x="{x}" y="{_LANES[lane]}" width="{width}" height="{_BAR}" rx="2">'
            f"<title>{escape(title)}</title></rect>"
        )

    def _generation(self, one: Generation) -> str:
        last_ns = max([one.start_ns, *(at for at, _, _ in one.engines)])
        end_ns = one.end_ns if one.end_ns is not None else self._cut_ns(one, last_ns)
        title = f"generation {one.number}: {plural(one.tokens, 'token')} in {seconds((end_ns - one.start_ns) / 1e9)}"
        for _, offset, incarnation in one.engines[1:]:
            title += f"\nresumed after token {offset} on {incarnation}"
        return self._bar("model", one.start_ns, end_ns, *_live_or_not("model", title, one.superseded_by))

    def _action(self, one: Action) -> str:
        title = f"action {one.number}: {one_line(command_of(one), 160)}\n{outcome(one)}"
        if one.end_ns is None:
            end_ns = self._cut_ns(one, one.start_ns)
            return self._bar("actions", one.start_ns, end_ns, "lost", title, least=4.0)
        waited_s = (one.end_ns - one.start_ns) / 1e9 - one.duration_s
        title += f" after {seconds(one.duration_s)}" + (
            f", waited {seconds(waited_s)}" if waited_s >= _WAITED_S else ""
        )
        ran_ns = max(one.start_ns, one.end_ns - int(one.duration_s * 1e9))
        kind, title = _live_or_not("action", title, one.superseded_by)
        ran = self._bar("actions", ran_ns, one.end_ns, kind, title)
        if waited_s < _WAITED_S:
            return ran
        waiting = f"waiting{kind.removeprefix('action')}"
        return self._bar("actions", one.start_ns, ran_ns, waiting, "waited for its sandbox") + ran

    def _cut_ns(self, one: Generation | Action, least_ns: int) -> int:
        """Where a generation or an action without an end stops: at the failure that cut it off."""
        incident = one.superseded_by
        return max(least_ns, self._story.end_ns if incident is None else incident.detected_ns)

    def _life(self, life: Life) -> Iterator[str]:
        end_ns = self._story.end_ns if life.end_ns is None else life.end_ns
        lane = life.kind
        title = f"{life.kind} {life.incarnation}" + (f": {life.end}" if life.end else "")
        begin_ns = end_ns if life.serving_ns is None else min(life.serving_ns, end_ns)
        if begin_ns > life.start_ns and end_ns > self._story.start_ns:
            x, until = self._x(life.start_ns), self._x(begin_ns)
            y, armed = _LANES[lane] + _BAR + 6, escape(f"{title}, armed")
            yield f'<line class="shadow" x1="{x}" x2="{until}" y1="{y}" y2="{y}"><title>{armed}</title></line>'
        if life.serving_ns is not None:
            yield self._bar(lane, begin_ns, end_ns, f"life {lane}-life", title)

    def _checkpoints(self) -> Iterator[str]:
        y = _LANES["sandbox"] + _BAR / 2
        for one in self._story.checkpoints:
            if one.end_ns is None or one.end_ns > self._story.end_ns:
                continue
            kind = mark_of(one)
            x = self._x(one.end_ns if one.holds else one.start_ns)
            title = f"boundary {one.boundary.number}: {captured(one)}"
            if one.restored:
                title += f"\nrestored {plural(one.restored, 'time')}"
            yield (
                f'<path class="checkpoint {kind}" d="M{x} {y - 5}l5 5-5 5-5-5z"><title>{escape(title)}</title></path>'
            )

    def _outage(self, incident: Incident) -> Iterator[str]:
        if not incident.hit or incident.kind == "rewind":
            return
        x = self._x(incident.detected_ns)
        width = max(2.0, round(self._x(incident.resumed_ns or self._story.end_ns) - x, 1))
        yield f'<rect class="outage" x="{x}" y="{_TOP}" width="{width}" height="{_HEIGHT - _TOP - 8}"/>'

    def _failure(self, incident: Incident) -> Iterator[str]:
        x = self._x(incident.detected_ns)
        title = escape(f"{failed(incident)}: {incident.evidence}\n{recovered(incident)}")
        y = _LANES["engine" if incident.kind == "engine" else "sandbox"] + _BAR / 2
        if incident.kind == "rewind":
            y = _LANES["model"] + _BAR / 2
        kind = "failure" if incident.hit else "failure elsewhere"
        if incident.hit:
            yield f'<line class="{kind}" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - 8}"/>'
        yield (
            f'<g class="{kind}"><circle cx="{x}" cy="{y}" r="8"/>'
            f'<path d="M{x - 3} {y - 3}l6 6m0-6l-6 6"/><title>{title}</title></g>'
        )
        yield from self._rewind(incident)

    def _rewind(self, incident: Incident) -> Iterator[str]:
        """An arc from where the trajectory went on to the boundary to which it went back."""
        if incident.rewound_to is None or incident.resumed_ns is None:
            return
        target_ns = self._story.start_ns
        for action in self._story.actions:
            if action.boundary_sequence == incident.rewound_to.sequence and action.end_ns is not None:
                target_ns = action.end_ns
        start, end = self._x(incident.resumed_ns), self._x(target_ns)
        y = _LANES["actions"] + _BAR + 3
        depth = min(14.0, 4 + (start - end) / 40)
        yield (
            f'<path class="rewind" marker-end="url(#head)" d="M{start} {y}C{start} {y + depth},{end} {y + depth},'
            f'{end} {y + 1}"><title>rewound to boundary {incident.rewound_to.number}</title></path>'
        )


def _tick(at_s: float, step_s: float) -> str:
    """In seconds up to a minute, from there on as minutes and seconds: `45 s`, `1:45`; whole minutes at large steps."""
    if step_s < 1:
        return f"{at_s:.1f} s"
    if step_s >= 60:
        return f"{at_s / 60:.0f} min"
    return f"{at_s:.0f} s" if at_s < 60 else f"{at_s // 60:.0f}:{at_s % 60:02.0f}"


def _live_or_not(kind: str, title: str, superseded_by: Incident | None) -> tuple[str, str]:
    if superseded_by is None:
        return kind, title
    return f"{kind} superseded", f"{title}\nsuperseded"


_DEFINITIONS = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch-ground" width="5" height="5"/><line class="hatch-line" x1="0" y1="0" x2="0" y2="5"/></pattern>'
    '<marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M1 1L7 4L1 7z"/></marker></defs>'
)
