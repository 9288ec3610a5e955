"""The client for rollout code without asyncio: the same calls, each blocking until it is done.

One background thread runs the event loop of all blocking journals of the process; it is a daemon and stops with the
last journal. Errors are those of the asynchronous client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from belayer.client import CHUNK_S, CHUNK_TOKENS, OPENED_S, Trajectory
from belayer.journal.connect import open_store, with_archive
from belayer.journal.limits import LIMITS, Limits
from belayer.projections.trajectory import Boundary, TrajectoryState

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's when that is installed (`pip install 'belayer[speed]'`), else asyncio's; appends cost less in it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class BlockingJournal:
    """A connection to the journal; `with BlockingJournal(url) as journal: journal.trajectory(name)`.

    `archive`: where finished trajectories are, as `belayer actors --archive` has it; needed only to open these.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str = "default",
        durability: str = "everysec",
        archive: str | None = None,
    ) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="belayer-journal", daemon=True)
        self._thread.start()
        try:
            store = self.call(open_store(url, namespace=namespace, durability=durability))
            self._store = self.call(with_archive(store, archive, namespace))
        except BaseException:
            self._stop()
            raise

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the journal's loop and wait for it. Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def trajectory(
        self,
        name: str,
        *,
        writer: str = "rollout",
        chunk_tokens: int = CHUNK_TOKENS,
        chunk_s: float = CHUNK_S,
        timeout_s: float = OPENED_S,
        limits: Limits = LIMITS,
    ) -> BlockingTrajectory:
        """Open a new trajectory or resume one; see `belayer.client.Trajectory.open`."""
        opening = Trajectory.open(
            self._store,
            name,
            writer=writer,
            chunk_tokens=chunk_tokens,
            chunk_s=chunk_s,
            timeout_s=timeout_s,
            limits=limits,
        )
        return BlockingTrajectory(self, self.call(opening))

    def close(self) -> None:
        """Close the connection and stop the loop."""
        try:
            self.call(self._store.close())
        finally:
            self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> BlockingJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class BlockingTrajectory:
    """`belayer.client.Trajectory`, blocking: the same calls with the same arguments, which are explained there. Use it
    in one thread at a time."""

    def __init__(self, journal: BlockingJournal, trajectory: Trajectory) -> None:
        self._journal = journal
        self._trajectory = trajectory

    @property
    def state(self) -> TrajectoryState:
        """The fold of what the journal has acknowledged."""
        return self._trajectory.state

    def start(self, run: str, task: str, prompt: Iterable[int], labels: Mapping[str, str] | None = None) -> None:
        self._journal.call(self._trajectory.start(run, task, prompt, labels))

    def begin_generation(self, worker: str = "", incarnation: str = "") -> int:
        return self._journal.call(self._trajectory.begin_generation(worker, incarnation))

    def append_tokens(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        weight_version: int = 0,
        loss_mask: Sequence[int | bool] | None = None,
    ) -> None:
        self._journal.call(self._trajectory.append_tokens(token_ids, logprobs, weight_version, loss_mask))

    def finish_generation(self, finish_reason: str) -> None:
        self._journal.call(self._trajectory.finish_generation(finish_reason))

    def start_action(self, command: str, timeout_s: float, sandbox_incarnation: str = "") -> int:
        return self._journal.call(self._trajectory.start_action(command, timeout_s, sandbox_incarnation))

    def commit_action(
        self,
        exit_status: int,
        observation: Iterable[int],
        observation_digest: bytes,
        duration_s: float,
        timed_out: bool = False,
        dropped_bytes: int = 0,
    ) -> Boundary:
        return self._journal.call(
            self._trajectory.commit_action(
                exit_status, observation, observation_digest, duration_s, timed_out, dropped_bytes
            )
        )

    def finish(self, reason: str, reward: float | None = None) -> None:
        self._journal.call(self._trajectory.finish(reason, reward))

    def abort(self, reason: str) -> None:
        self._journal.call(self._trajectory.abort(reason))

    def flush(self) -> None:
        self._journal.call(self._trajectory.flush())

    def close(self) -> None:
        self._journal.call(self._trajectory.close())

    def __enter__(self) -> BlockingTrajectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
