"""What a process does when a fatal signal hits it: say where its Python stands, and be dead at once.

Libraries that SGLang imports (apache-tvm-ffi, for one) install handlers of their own that read the debug symbols of
everything loaded before they let the process die: two seconds with torch. faulthandler, which SGLang enables after
them, writes the Python traceback of every thread in milliseconds, and then raises the signal again for the handler
that it found. A core file would take longer still, and holds the arena on the CPU backend.
"""

from __future__ import annotations

import faulthandler
import resource
import signal

_FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
"""Those that faulthandler handles."""


def die_at_once() -> None:
    """From now on only faulthandler acts on a fatal signal, and no core is written. In the main thread."""
    faulthandler.disable()  # puts back the handlers that it found
    for number in _FATAL:
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
