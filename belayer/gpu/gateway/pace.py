"""How long tokens of a stream wait for company before they are appended together.

The first tokens, and those of few streams, do not wait: each append begins when the one before is acknowledged. The
more streams there are, the longer each waits between its appends, so that all together keep to what the journal can
take, up to the 100 ms that a token chunk may wait at most. What this adds to a caller's stream is at most the wait
plus one append, once: tokens that come meanwhile travel together, so the rate stays the engine's.
"""

from __future__ import annotations

from belayer.client import CHUNK_S


def pause_s(streams: int, appends_per_s: int) -> float:
    """Seconds between the beginnings of two appends of one stream, when `streams` share the journal."""
    return min(CHUNK_S, streams / appends_per_s)
