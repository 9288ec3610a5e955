"""Whatever may happen in a sound journal, the audit has nothing to say about it."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis.stateful import invariant

from belayer.ids import StreamId, StreamKind
from belayer.journal.codec import Entry
from belayer.journal.events import AnyEvent
from belayer.journal.export import read_entries
from belayer.journal.memory_store import MemoryStore
from replay.audit import audit
from tests.actors.test_crash_anywhere import Anywhere
from tests.histories import Life, lives
from tests.replay.journals import BOX, Story, T

sound_lives = lives().filter(lambda life: life.container.phase == "live")
"""After a give-up the strategy lets the sandbox go on; no writer of ours does."""


def told(stream: StreamId, events: list[AnyEvent], story: Story) -> None:
    for event in events:
        story.write(stream, event)


@given(sound_lives)
def test_random_lives_are_clean(life: Life) -> None:
    story = Story()
    told(T, life.rollout, story)
    told(BOX, life.box, story)
    assert audit(story.entries()).findings == []


@given(sound_lives)
def test_the_order_of_streams_does_not_matter(life: Life) -> None:
    story = Story()
    told(T, life.rollout, story)
    told(BOX, life.box, story)
    entries = story.entries()
    backwards = sorted(entries, key=lambda item: item[0], reverse=True)
    assert audit(backwards).findings == audit(entries).findings


async def entries_of(store: MemoryStore) -> list[tuple[StreamId, Entry]]:
    return [(stream, entry) for stream in await store.streams() async for entry in read_entries(store, stream)]


Snapshot = list[tuple[StreamId, Entry]]


def of_kind(snapshot: Snapshot, kind: StreamKind) -> Snapshot:
    return [(stream, entry) for stream, entry in snapshot if stream.kind is kind]


class Audited(Anywhere):
    """The actors' own state machine: real rollout, checkpointer, recovery and reaper, struck anywhere."""

    earlier: Snapshot

    def check_end(self) -> None:
        super().check_end()
        assert audit(asyncio.run(entries_of(self.store))).findings == []

    @invariant()
    def clean_at_any_time(self) -> None:
        """Also when one stream was read a while before the other, as the audit of a live journal does."""
        if not hasattr(self, "store"):
            return
        now = self.loop.run_until_complete(entries_of(self.store))
        before = getattr(self, "earlier", now)
        for box, rollout in ((now, now), (before, now), (now, before)):
            report = audit(of_kind(box, StreamKind.SANDBOX) + of_kind(rollout, StreamKind.TRAJECTORY))
            assert [found for found in report.findings if "never completed" not in found.message] == []
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps % 3 == 0:
            self.earlier = now


Audited.TestCase.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
TestAuditedAnywhere = Audited.TestCase
