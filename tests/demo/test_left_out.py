import pytest

from belayer.demo.left_out import everything, is_left_out, masked, masked_path


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"==== 22 passed in 0.04s ====", b"===== 22 passed in 12.3s ====="),
        (b"==== 22 passed in 9.04s ====", b"===== 22 passed in 122.30s (0:02:02) ====="),
        (b"-rw-r--r-- 1 root root 35 Nov 30 06:51 AUTHORS", b"-rw-r--r-- 1 root root 35 Dec  1 17:02 AUTHORS"),
        (b"<object at 0x7f0c5a3b2d10>", b"<object at 0x7fffd0a02e80>"),
        (b"built at 2026-11-30 06:51:12,123", b"built at 2026-12-01T23:59:59"),
        (b"/tmp/tmpab12cd_9/x and /tmp/tmp.kq8Wzy", b"/tmp/tmpzzzzzzzz/x and /tmp/tmp.AAAAAA"),
        (b"killed pid 123", b"killed pid 7"),
        (b"took 35 ms", b"took 1.5 seconds"),
    ],
)
def test_what_depends_on_the_time_and_place_of_a_run_is_masked(one: bytes, other: bytes) -> None:
    assert one != other and masked(one) == masked(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"22 passed in 0.04s", b"21 passed in 0.04s"),
        (b"-rw-r--r-- 1 root root 35 Nov 30 06:51 AUTHORS", b"-rw-r--r-- 1 root root 36 Nov 30 06:51 AUTHORS"),
        (b"value 0x10", b"value 0x11"),
        (b"line 59", b"line 60"),
        (b"/tmp/mine", b"/tmp/yours"),
        (b"__version__ = '2.2'", b"__version__ = '3.0'"),
        (b"0123abcd", b"0123abce"),
        (b"a == b", b"a = b"),
        (b"=====", b"======"),
        (b"-----", b"------"),
    ],
)
def test_anything_else_is_not_masked(one: bytes, other: bytes) -> None:
    assert masked(one) != masked(other)


def test_files_that_hold_time_stamps_are_left_out_and_no_others() -> None:
    assert is_left_out("/testbed/pkg/__pycache__/a.cpython-311.pyc")
    assert is_left_out("/testbed/pkg/__pycache__")
    assert is_left_out("/testbed/.git/index")
    assert not is_left_out("/testbed/.git/HEAD")
    assert not is_left_out("/testbed/index")
    assert not is_left_out("/testbed/pycache.py")
    assert masked_path("/tmp/tmpab12cd_9/x") == masked_path("/tmp/tmpzz12cd_9/x") != "/tmp/tmpab12cd_9/x"


def test_every_omission_has_a_reason() -> None:
    omissions = everything()
    assert len(omissions) > 10
    assert all(omission.what and omission.reason for omission in omissions)
