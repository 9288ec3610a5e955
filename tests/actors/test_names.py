import os
import subprocess

from belayer.actors.names import is_surely_dead, new_name, pid_of
from tests.waiting import DEADLINE_S


def test_a_name_tells_the_process_and_whether_it_lives() -> None:
    mine = new_name("my-host")
    assert pid_of(mine) == os.getpid()
    assert not is_surely_dead(mine, "my-host")
    with subprocess.Popen(["true"]) as child:
        child.wait(timeout=DEADLINE_S)
    gone = f"actors/my-host-{child.pid}-0a1b2c3d"
    assert is_surely_dead(gone, "my-host")
    assert not is_surely_dead(gone, "another-host"), "another host's processes cannot be seen from here"


def test_other_writers_have_no_pid() -> None:
    for name in ("rollout", "actors/x", "my-host-12-ab", ""):
        assert pid_of(name) == 0
        assert not is_surely_dead(name, "my-host")
