"""A process's memory is in huge pages when it was asked for, and its contents are the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
from belayer.gpu.huge_pages import collapse
memory = bytearray(b"x") * (64 << 20)
print(collapse() >> 20, memory.count(b"x") >> 20)
"""


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_what_was_written_is_in_huge_pages_and_unchanged() -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    huge_mib, whole_mib = map(int, said.split())
    assert huge_mib >= 32 and whole_mib == 64
