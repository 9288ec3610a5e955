"""All requests of one gateway: each request id has one run, each trajectory one at a time.

A run without callers goes on for a grace period, in which its caller may come back; then it is given up, or brought
to its end, as is set. Nothing is kept of a run that is over: whoever comes later is answered from the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from belayer.gpu.gateway.answer import Answer, Caller
from belayer.gpu.gateway.engines import Engines
from belayer.gpu.gateway.errors import conflict, later, wrong
from belayer.gpu.gateway.request import Asked, Form
from belayer.gpu.gateway.run import Around, Run
from belayer.gpu.gateway.settings import Settings
from belayer.gpu.gateway.text import Tokenizer
from belayer.gpu.gateway.workers import Workers
from belayer.journal.store import JournalStore


class Desk:
    """Takes requests in, and lets go of them."""

    def __init__(
        self, store: JournalStore, workers: Workers, engines: Engines, settings: Settings, tokenizer: Tokenizer | None
    ) -> None:
        self._settings = settings
        self._around = Around(store, workers, engines, settings, tokenizer, lambda: len(self._runs))
        self._runs: dict[str, Run] = {}
        self._names: dict[str, Run] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.callers = 0
        """Open requests."""
        self.draining = False

    @contextmanager
    def attached(self, asked: Asked, form: Form) -> Iterator[tuple[Answer, Caller]]:
        """The request's answer, begun or under way, and its caller's place in it. RefusedError when it cannot be."""
        if self.draining:
            raise later("draining", "this gateway is being stopped; ask again with the same rid, another one answers")
        if self.callers >= self._settings.max_streams:
            raise later("too_many_streams", f"{self.callers} requests are open, as many as --max-streams allows")
        if asked.text is not None and self._around.tokenizer is None:
            raise wrong(
                "text needs a tokenizer and this gateway has none; send token ids, or start it with --tokenizer"
            )
        if asked.stops and self._around.tokenizer is None:
            raise wrong("stop strings need a tokenizer; use stop_token_ids, or start the gateway with --tokenizer")
        run = self._run_of(asked)
        caller = Caller(form.offset, form.stream)
        run.answer.callers.add(caller)
        self.callers += 1
        try:
            yield run.answer, caller
        finally:
            self.callers -= 1
            run.answer.leave(caller)
            self._left(run)

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new; let what runs finish for so long, and leave the rest in the journal, to be resumed."""
        self.draining = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run_of(self, asked: Asked) -> Run:
        run = self._runs.get(asked.rid)
        if run is not None:
            if run.asked != asked:
                raise conflict("rid_reused", f"rid {asked.rid} is another request, which is running; give each its own")
            return run
        if (other := self._names.get(asked.name)) is not None:
            raise conflict(
                "trajectory_busy",
                f"request {other.asked.rid} generates in trajectory {asked.name}; wait for it, or name another",
            )
        run = Run(asked, self._around)
        self._runs[asked.rid] = self._names[asked.name] = run
        task = asyncio.create_task(run.drive(), name=f"gateway-{asked.rid}")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._over(run, done))
        return run

    def _over(self, run: Run, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        del self._runs[run.asked.rid], self._names[run.asked.name]
        if not task.cancelled():
            task.result()

    def _left(self, run: Run) -> None:
        answer, settings = run.answer, self._settings
        if answer.callers or answer.is_over or settings.on_disconnect == "continue" or self.draining:
            return
        asyncio.get_running_loop().call_later(settings.grace_s, self._give_up, run, answer.departures)

    def _give_up(self, run: Run, departures: int) -> None:
        """Unless a caller came back meanwhile."""
        if not run.answer.callers and run.answer.departures == departures:
            run.give_up(f"its caller left and did not come back within {self._settings.grace_s:g} s")
