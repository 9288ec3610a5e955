"""The base of all events; the events themselves are in `belayer.journal.events`."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, array_like=True, tag_field="tag", gc=False):
    """The base of all events. Never instantiated itself.

    Events hold plain values and so never refer to themselves: the garbage collector need not look at them.
    """
