"""A bell that rings at the very moment at which a thread dies, long before its process is gone.

A process that holds much GPU memory takes 0.1 s to die: the kernel tears its memory down before it reports the exit.
But at the beginning of a thread's exit the kernel walks the list of robust futexes that the thread holds, marks each
`owner died` and wakes whoever waits (pthread_mutexattr_setrobust(3), Linux's futex_exit_release). So an engine's
scheduler thread holds a robust mutex in shared memory for as long as it lives, and the memory server waits for it.

Invariant: when `wait` returns, the thread that armed the bell executes no more user code, ever. A process that is
merely stopped or hung does not ring.
"""

from __future__ import annotations

import ctypes
import os

from belayer.gpu.errors import DeviceCallError

BELL_BYTES = 128
_EOWNERDEAD = 130
_ENOTRECOVERABLE = 131
_PROCESS_SHARED = 1
_ROBUST = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Bell:
    """A bell at `address`: BELL_BYTES of writable memory that both processes have mapped."""

    def __init__(self, address: int) -> None:
        self._mutex = ctypes.c_void_p(address)

    def arm(self) -> None:
        """Ring when the calling thread dies. Nobody may be waiting on this memory any more."""
        attributes = ctypes.create_string_buffer(64)
        _checked("pthread_mutexattr_init", _libc.pthread_mutexattr_init(attributes))
        _checked("setpshared", _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _checked("setrobust", _libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _checked("pthread_mutex_init", _libc.pthread_mutex_init(self._mutex, attributes))
        _checked("pthread_mutex_lock", _libc.pthread_mutex_lock(self._mutex))

    def disarm(self) -> None:
        """Before the memory is unmapped: the thread that armed it keeps a list of what it holds, in that memory.

        Nobody may be waiting. In another thread than the one that armed it this does nothing.
        """
        _libc.pthread_mutex_unlock(self._mutex)

    def wait(self) -> None:
        """Block until the thread that armed it has died; at once when it has already. In a thread of one's own."""
        result = _libc.pthread_mutex_lock(self._mutex)
        if result == _EOWNERDEAD:
            # Not made consistent: whoever asks next is told at once that the owner is gone.
            _libc.pthread_mutex_unlock(self._mutex)
        elif result != _ENOTRECOVERABLE:
            _checked("pthread_mutex_lock", result or _EOWNERDEAD)


def _checked(call: str, result: int) -> None:
    if result:
        raise DeviceCallError(call, os.strerror(result))
