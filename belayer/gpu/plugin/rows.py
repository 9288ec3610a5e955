"""Which request is in which row of the slot table, and how much of it the ledger says.

Invariant: the ledger says of a row only what is proved when it is said, and nothing of one whose slots may be used for
something else. A request that cannot be said (too long, or with an extra key) is left out: computed again, never wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from belayer.gpu.ledger import Ledger, request_digest


class Rows:
    """Used in the scheduler's thread, as its ledger is."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[str, int, int]] = {}
        """By row: the request's id, its digest, and how many of its tokens the ledger has."""

    def decoded(self, ledger: Ledger, requests: Iterable[Any], version: int) -> None:
        """A decode step's tokens are sampled, so the KV before them is complete.

        Said from a row's second decode step on. When SGLang has a prefill's result it merges equal prefixes: the device
        moves the row's slots, and what they were is free. By then the first decode step is launched and proves
        nothing; the second one is launched after the move and waits for it.
        """
        said = self._said
        for request in requests:
            row, output = request.req_pool_idx, request.output_ids
            if row is None or not output or request.extra_key is not None:
                continue
            prompt = request.origin_input_ids
            total = len(prompt) + len(output)
            if total > ledger.width:
                continue
            rid, digest, count = said.get(row, ("", 0, 0))
            if rid != request.rid:
                digest, total = request_digest(request.rid), 0
            elif not count:
                ledger.write(row, digest, 0, prompt + output, version)
            elif count < total:
                ledger.write(row, digest, count, output[count - len(prompt) :], version)
            said[row] = (request.rid, digest, total)

    def freed(self, ledger: Ledger, row: int) -> None:
        """From here on the row's slots may be given to another request."""
        ledger.invalidate(row)
        self._said.pop(row, None)

    def cleared(self, ledger: Ledger) -> None:
        """The same, of all rows."""
        ledger.invalidate_all()
        self._said.clear()
