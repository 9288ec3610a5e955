"""What the kernel does with a killed process, and when: `python -m benchmarks.teardown PID` until PID is gone.

Prints one line when it looks, and at the end a JSON list of [monotonic seconds, what was new]: its memory in MB and
threads before the kill; then when its memory was gone, when its files were, when it was a zombie, when it was gone.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

_LIMIT_S = 30.0


def watch(pid: int) -> list[tuple[float, str]]:
    folder = Path(f"/proc/{pid}")
    seen: list[tuple[float, str]] = []
    last = ""
    end_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < end_s:
        now_s = time.monotonic()
        try:
            lines = (folder / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            seen.append((now_s, "gone"))
            break
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        try:
            files = "files" if any((folder / "fd").iterdir()) else "no files"
        except OSError:
            files = "no files"
        memory = "memory" if "VmRSS" in status else "no memory"
        now = f"{status['State'].split()[0]}, {memory}, {files}"
        if now[0] in "RSD":
            now = "alive" + now[1:]
        if not seen:
            resident = [f"{name} {int(status.get(name, '0').split()[0]) // 1024} MB" for name in _SIZES]
            now_detail = f"{now}, {status['Threads']} threads, {', '.join(resident)}"
            seen.append((now_s, now_detail))
        elif now != last:
            seen.append((now_s, f"{now}, {status['Threads']} threads"))
        last = now
        time.sleep(0.0005)
    return seen


_SIZES = ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin", "VmPTE")

if __name__ == "__main__":
    print("watching", flush=True)
    print(json.dumps(watch(int(sys.argv[1]))))
