"""A story as one HTML file: no script, no font, no picture from elsewhere; light or dark as the reader's system is."""

from __future__ import annotations

import os
from html import escape
from importlib.resources import files
from pathlib import Path

from belayer.errors import InputError
from replay.timeline.branches import branches
from replay.timeline.chart import chart
from replay.timeline.model import Incident, Story
from replay.timeline.words import failed, figures, headline, lost, one_line, recovered, seconds, since


def write_page(story: Story, path: Path, remark: str = "") -> None:
    """Write the page, whole or not at all. InputError when the place cannot be written.

    `remark`: what the writer knows beyond the journal, a sentence under the verdict.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(page(story, remark), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror}; choose another place") from None


def page(story: Story, remark: str = "") -> str:
    """The whole document."""
    style = files("replay.timeline").joinpath("page.css").read_text(encoding="utf-8")
    good = story.ending == "finished" and all(one.resumed_ns is not None for one in story.incidents if one.hit)
    task = "" if story.task in ("", story.name) else f'<p class="task">{escape(one_line(story.task, 400))}</p>'
    line = headline(story)
    told = " ".join(sentence for sentence in (lost(story), remark) if sentence)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(story.name)}: {escape(line)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<header>
<p class="kind">trajectory{f" of run {escape(story.run)}" if story.run else ""}</p>
<h1>{escape(story.name)}</h1>
{task}<p class="verdict {"good" if good else "open"}">{escape(line[0].upper() + line[1:])}</p>
{f'<p class="told">{escape(told)}</p>' if told else ""}</header>
<dl class="figures">{_figures(story)}</dl>
<section aria-label="Time">
<h2>What ran when</h2>
<div class="scroll" role="group" aria-label="The chart, which scrolls" tabindex="0">{chart(story)}</div>
{_LEGEND}
</section>
{_incidents(story)}<section aria-label="Turns">
<h2>Turn by turn</h2>
<p class="aside">The straight line is what counts; branches to its right were superseded by a rewind. A turn is a
generation and the action that follows it: tokens and time of the model, then outcome and time of the action.</p>
<ol class="turns">{branches(story)}</ol>
</section>
</main>
<footer>Drawn from {story.events:,} events of the journal. Times are the writers' clocks.</footer>
</body>
</html>
"""


def _figures(story: Story) -> str:
    def one(name: str, value: str, remark: str) -> str:
        kind = ' class="bad"' if name == "audit" and story.findings else ""
        return f"<div><dt>{name}</dt><dd{kind}>{escape(value)}</dd><dd class=remark>{escape(remark)}</dd></div>"

    return "".join(one(*row) for row in figures(story))


def _incidents(story: Story) -> str:
    hits = [incident for incident in story.incidents if incident.hit]
    if not hits:
        return ""
    longest_s = max((incident.outage_s or 0.0 for incident in hits), default=0.0)
    cards = "".join(_card(story, incident, longest_s) for incident in hits)
    return f"""<section aria-label="Failures">
<h2>How each failure was overcome</h2>
<ol class="incidents">{cards}</ol>
<p class="legend"><span><i class="swatch phase-1"></i>until a recovery began</span>
<span><i class="swatch phase-2"></i>until a replacement was ready</span>
<span><i class="swatch phase-3"></i>until the trajectory went on</span></p>
</section>
"""


def _card(story: Story, incident: Incident, longest_s: float) -> str:
    took = "not resumed" if incident.outage_s is None else seconds(incident.outage_s)
    return (
        f'<li><span class="when">{since(story, incident.detected_ns)}</span><div>'
        f"<strong>{escape(failed(incident))}</strong> <span class=evidence>{escape(incident.evidence)}</span>"
        f"<div class=how>{escape(recovered(incident))}</div>{_phases(incident, longest_s)}</div>"
        f'<span class="took">{took}</span></li>'
    )


def _phases(incident: Incident, longest_s: float) -> str:
    """Detection to resumption as one bar, on the same scale for all incidents."""
    if longest_s <= 0 or incident.resumed_ns is None:
        return ""
    marks = {
        "recovery began": incident.started_ns,
        "replacement ready": incident.ready_ns,
        "trajectory went on": incident.resumed_ns,
    }
    parts: list[str] = []
    words: list[str] = []
    last_ns = incident.detected_ns
    for number, (what, mark_ns) in enumerate(marks.items(), 1):
        if mark_ns is None or mark_ns < last_ns:
            continue
        spent_s = (mark_ns - last_ns) / 1e9
        parts.append(f'<i class="phase-{number}" style="width:{spent_s / longest_s * 100:.2f}%"></i>')
        words.append(f"{what} +{seconds(spent_s)}")
        last_ns = mark_ns
    return f'<div class="phases">{"".join(parts)}</div><div class="spent">{", ".join(words)}</div>'


_LEGEND = """<p class="legend">
<span><i class="swatch model"></i>model</span><span><i class="swatch action"></i>action</span>
<span><i class="swatch waiting"></i>action waiting (frozen or failed sandbox)</span>
<span><i class="swatch gone"></i>superseded</span><span><i class="swatch life"></i>incarnation</span>
<span><svg width="12" height="12"><path class="checkpoint published" d="M6 1l5 5-5 5-5-5z"/></svg>checkpoint</span>
<span><svg width="12" height="12"><path class="checkpoint extended" d="M6 1l5 5-5 5-5-5z"/></svg>nothing new</span>
<span><svg width="12" height="12"><path class="checkpoint restored" d="M6 1l5 5-5 5-5-5z"/></svg>restored later</span>
<span><svg width="12" height="12"><path class="checkpoint discarded" d="M6 1l5 5-5 5-5-5z"/></svg>given up</span>
<span><svg width="16" height="16"><g class="failure"><circle cx="8" cy="8" r="7"/>
<path d="M5.5 5.5l5 5m0-5l-5 5"/></g></svg>failure</span>
<span><i class="swatch outage"></i>until the trajectory went on</span></p>"""
