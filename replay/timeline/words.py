"""Numbers and moments of a story as people read them, the same in the terminal and on the page."""

from __future__ import annotations

from statistics import median
from typing import Literal

from replay.facts import names
from replay.timeline.model import Action, Checkpoint, Generation, Incident, Story


def seconds(value: float) -> str:
    """`3 ms`, `0.42 s`, `12.3 s`, `7 min 40 s`, `5 h 12 min`."""
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 9.95:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def size(size_bytes: int) -> str:
    """`812 KB`, `3.1 MB`, `5.2 GB`."""
    if size_bytes < 1e6:
        return f"{size_bytes / 1e3:.0f} KB"
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:.1f} GB"


def plural(count: int, noun: str) -> str:
    """`1 action`, `2 actions`, `1,760 tokens`."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def since(story: Story, time_ns: int) -> str:
    """When, counted from the trajectory's start: `+12.34`."""
    return f"{(time_ns - story.start_ns) / 1e9:+.2f}"


def one_line(text: str, width: int) -> str:
    """The text on one line of at most that width."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"


def command_of(action: Action) -> str:
    """The action's command, or that it cannot be read."""
    return action.command or "(sealed)"


def outcome(action: Action) -> str:
    """What became of an action."""
    if action.end_ns is None:
        return "no outcome"
    if action.timed_out:
        return "timed out"
    return f"exit {action.exit_status}"


def failed(incident: Incident) -> str:
    """What failed, in a few words."""
    if incident.kind == "rewind":
        return "rewound on purpose"
    verb = {"died": "died", "hung": "hung", "unreachable": "became unreachable", "gpu": "lost its GPU"}
    return f"{incident.kind} {verb.get(incident.failure, 'lost an action')}"


def recovered(incident: Incident) -> str:
    """How it was overcome, in one sentence; says so when it was not."""
    parts: list[str] = []
    if incident.kind == "sandbox" and incident.ready_ns is not None:
        parts.append(f"restored from {'a checkpoint' if incident.checkpoint else 'the initial state'}")
        if incident.left_out:
            parts.append(f"without {names(incident.left_out)}, which it does not hold")
    elif incident.kind == "engine" and incident.ready_ns is not None:
        phases = ", ".join(f"{name} {seconds(took_s)}" for name, took_s in incident.phases_s.items())
        parts.append(f"{incident.successor or 'another engine'} took over" + (f" ({phases})" if phases else ""))
        if incident.adopted_tokens:
            parts.append(f"the KV cache of {plural(incident.adopted_tokens, 'token')} adopted")
    if incident.attempts > 1:
        parts.append(f"the recovery itself died, another finished it ({plural(incident.attempts, 'attempt')})")
    if incident.rewound_to is not None:
        again = f"{plural(incident.actions_again, 'action')} and {plural(incident.tokens_again, 'token')} superseded"
        parts.append(f"rewound to boundary {incident.rewound_to.number}, {again}")
    elif incident.kind == "sandbox" and incident.resumed_ns is not None:
        parts.append("nothing superseded")
    elif incident.kind == "engine" and incident.hit and incident.resumed_ns is not None:
        parts.append("every journaled token kept")
    if not incident.hit:
        parts.append("this trajectory did not notice")
    elif incident.resumed_ns is None and incident.kind != "rewind":
        parts.append("not resumed")
    return "; ".join(parts)


def mark_of(checkpoint: Checkpoint) -> Literal["restored", "published", "extended", "discarded"]:
    """Which mark stands for it."""
    if checkpoint.restored:
        return "restored"
    return "published" if checkpoint.was_published else "extended" if checkpoint.held_by else "discarded"


def captured(checkpoint: Checkpoint) -> str:
    """A checkpoint in a few words."""
    if checkpoint.was_published:
        frozen, took = seconds(checkpoint.frozen_s), seconds(checkpoint.total_s)
        new = f" ({size(checkpoint.stored_bytes)} new)" if checkpoint.stored_bytes else ""
        without = f", without {', '.join(checkpoint.not_captured)}" if checkpoint.not_captured else ""
        kind = "checkpoint" if not checkpoint.left_out else f"files alone, not {names(checkpoint.left_out)}:"
        return f"{kind} {size(checkpoint.size_bytes)}{new}, frozen {frozen} of {took}{without}"
    if checkpoint.held_by:
        return f"nothing had changed since checkpoint {checkpoint.held_by}, frozen {seconds(checkpoint.frozen_s)}"
    return f"no checkpoint: {checkpoint.reason}" if checkpoint.state == "discarded" else "checkpoint not finished"


def headline(story: Story) -> str:
    """The story in one line."""
    hits = [incident for incident in story.incidents if incident.hit and incident.kind != "rewind"]
    ending = {"finished": "finished", "aborted": "was aborted"}.get(story.ending, f"is {story.ending}")
    if not hits:
        return f"{ending}, undisturbed"
    resumed = [incident for incident in hits if incident.resumed_ns is not None]
    if len(resumed) == len(hits):
        return f"{ending} after surviving {plural(len(hits), 'failure')}"
    return f"{ending}; {len(resumed)} of {plural(len(hits), 'failure')} survived"


def lost(story: Story) -> str:
    """What the failures took in the end, in one sentence; empty when nothing failed or it cannot be said yet."""
    hits = [incident for incident in story.incidents if incident.hit]
    if not hits or story.ending != "finished" or story.findings or any(one.resumed_ns is None for one in hits):
        return ""
    again = [one for one in (*story.actions, *story.generations) if one.superseded_by is not None]
    if not again:
        return "Nothing was lost: every action and every token stands, once."
    tokens = sum(one.tokens for one in again if isinstance(one, Generation))
    actions = plural(sum(isinstance(one, Action) for one in again), "action")
    return f"Nothing but time was lost: {actions} and {plural(tokens, 'token')} were superseded and generated again."


def figures(story: Story) -> list[tuple[str, str, str]]:
    """What a summary shows: name, value, and a remark."""
    live_actions = [action for action in story.actions if action.superseded_by is None and action.end_ns is not None]
    live_tokens = sum(one.tokens for one in story.generations if one.superseded_by is None)
    again_tokens = sum(one.tokens for one in story.generations if one.superseded_by is not None)
    again_actions = len(story.actions) - len([one for one in story.actions if one.superseded_by is None])
    outages = [incident.outage_s for incident in story.incidents if incident.hit and incident.outage_s is not None]
    published = [one for one in story.checkpoints if one.was_published]
    extended = sum(bool(one.held_by) for one in story.checkpoints)
    skipped = f", {extended} more not needed" if extended else ""
    rows = [
        ("duration", seconds(story.duration_s), f"{plural(story.events, 'event')} in the journal"),
        ("actions", str(len(live_actions)), f"{again_actions} more superseded" if again_actions else "each once"),
        ("tokens", f"{live_tokens:,}", f"{again_tokens:,} more superseded" if again_tokens else "none superseded"),
        (
            "failures",
            str(len([one for one in story.incidents if one.hit and one.kind != "rewind"])),
            f"resumed after {seconds(median(outages))}, worst {seconds(max(outages))}" if outages else "none",
        ),
        (
            "checkpoints",
            str(len(published)),
            f"frozen {seconds(median(one.frozen_s for one in published))} each{skipped}"
            if published
            else "none published",
        ),
    ]
    stored_bytes = sum(one.stored_bytes for one in published)
    if stored_bytes:
        rows.append(("stored", size(stored_bytes), f"of {size(sum(one.size_bytes for one in published))} captured"))
    if alone := sum(bool(one.left_out) for one in published):
        rows.append(("files alone", str(alone), "checkpoints, of which a process could not be captured"))
    if mounts := sorted({mount for one in published for mount in one.not_captured}):
        rows.append(("not captured", ", ".join(mounts), "folders of the host and volumes"))
    found = "clean" if not story.findings else plural(story.findings, "finding")
    rows.append(("audit", found, "sequences, digests, boundaries"))
    if story.sealed_with:
        keys = ", ".join(story.sealed_with)
        rows.append(("sealed", f"with {keys}", "name it in BELAYER_ENCRYPTION_KEYS to see commands"))
    return rows
