"""Process 1 of a sandbox: runs numbered actions, each number at most once ever. Standard library only, Python >= 3.7.

    python3 -I -S runner.py CONTROL_DIR [USER]

With USER (a name, a uid or uid:gid) actions run as that user; the runner itself stays root.

The control folder is shared with the host. The host writes `request-ID` by rename and rings (a byte into the FIFO
`doorbell`); the answer is `reply-ID`, written by rename, and a byte into the FIFO `bell-CLIENT` when somebody holds it
open. The marker `idle-N` or `busy-N` (N: the last action begun) is renamed before a request is touched and after its
answer is delivered: while the marker says idle nothing in the folder but `doorbell` is open, so a frozen, idle runner
can be dumped and restored beside a fresh folder.

What fails in here is answered as an error, never raised: an exception that ends this process ends the container, which
the host sees at once. A request that cannot be read is dropped; the host's deadline covers it.
"""

import base64
import errno
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress

KEPT_RESULTS = 4
KEPT_BYTES = 2 << 20
"""What is kept of the last results, to answer a repeated number; the last one is kept whatever its size."""
READ_BYTES = 1 << 16
LEFT_OVER_BYTES = 1 << 20
"""At most this much is taken from the pipe after an action's end: a background process could write for ever."""
KILL_GRACE_S = 5.0
"""How long a killed action may take to die before it is answered as timed out all the same."""
REQUEST_LIMIT_BYTES = 512 << 20


class Output:
    """The first and the last bytes of a stream, as many as the limit; the middle is dropped and counted."""

    def __init__(self, limit):
        self.head_limit = limit - limit // 2
        self.tail_limit = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.dropped = 0

    def add(self, data):
        room = self.head_limit - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        self.tail += data
        if len(self.tail) > 2 * self.tail_limit + READ_BYTES:
            self.cut()

    def cut(self):
        over = max(0, len(self.tail) - self.tail_limit)
        del self.tail[:over]
        self.dropped += over

    def value(self):
        self.cut()
        return bytes(self.head + self.tail)


class Running:
    """The action that runs now and everyone who waits for its result."""

    def __init__(self, number, pid, pipe, output, timeout_s):
        self.number = number
        self.pid = pid
        self.pipe = pipe
        self.output = output
        self.started = time.monotonic()
        self.deadline = self.started + timeout_s
        self.killed_at = None
        self.waiting = []


class Runner:
    def __init__(self, control, user=""):
        self.control = control
        self.user = user
        self.workdir = os.getcwd()
        os.chdir("/")
        self.last = 0
        self.marker = ""
        self.results = {}
        """number (None: a set-up command, kept by nobody) -> (header, output) of the last few actions."""
        self.running = None
        self.drained = set()
        self.poll = select.poll()
        self.doorbell = os.open(self.path("doorbell"), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self.poll.register(self.doorbell, select.POLLIN)
        self.wakeup, wakeup_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.poll.register(self.wakeup, select.POLLIN)
        signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))

    def path(self, name):
        return os.path.join(self.control, name)

    def mark(self, state):
        """One rename, so that no file is ever open for it. A fresh folder may have no marker yet."""
        marker = "%s-%d" % (state, self.last)
        if marker == self.marker:
            return
        try:
            os.rename(self.path(self.marker or "new"), self.path(marker))
        except FileNotFoundError:
            os.close(os.open(self.path(marker), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        self.marker = marker

    def serve(self):
        self.mark("busy")
        self.take_requests()
        while True:
            if self.running is None:
                self.mark("idle")
            for fd, _ in self.poll.poll(self.poll_ms()):
                if fd == self.wakeup:
                    swallow(self.wakeup)
                elif fd == self.doorbell:
                    self.mark("busy")
                    swallow(self.doorbell)
                    self.take_requests()
                elif fd in self.drained:
                    self.drain(fd)
            self.reap()
            self.check_deadline()

    def poll_ms(self):
        if self.running is None:
            return None
        due = self.running.deadline if self.running.killed_at is None else self.running.killed_at + 0.05
        return max(0, min(int((due - time.monotonic()) * 1000) + 1, 3600 * 1000))

    # --- requests ---

    def take_requests(self):
        for name in sorted(os.listdir(self.control)):
            if not name.startswith("request-"):
                continue
            try:
                with open(self.path(name), "rb") as file:
                    request = json.loads(file.read(REQUEST_LIMIT_BYTES).decode())
                os.unlink(self.path(name))
                self.take(request)
            except (OSError, ValueError, KeyError, TypeError) as error:
                print("runner: %s dropped: %r" % (name, error), file=sys.stderr, flush=True)

    def take(self, request):
        kind = request["kind"]
        number = request.get("number")
        if kind == "ping":
            self.answer(request, {"last": self.last, "busy": self.running is not None})
        elif kind == "state":
            self.answer(request, {"last": self.last}, self.state())
        elif kind == "adopt":
            self.adopt(request)
        elif self.running is not None and self.running.number == number and kind == "run":
            self.running.waiting.append(request)
        elif kind == "run" and number in self.results:
            header, output = self.results[number]
            self.answer(request, header, output)
        elif kind == "run" and number <= self.last:
            self.answer(request, {"error": "action %d has run and its result is no longer kept" % number})
        elif self.running is not None:
            self.answer(request, {"error": "action %s is still running" % self.running.number})
        else:
            self.begin(request, number if kind == "run" else None)

    def state(self):
        """What a fresh runner must know to go on in this one's place."""
        results = [
            [number, header, base64.b64encode(output).decode()] for number, (header, output) in self.results.items()
        ]
        return json.dumps({"last": self.last, "results": results}).encode()

    def adopt(self, request):
        state = request["state"]
        if self.last or self.running is not None:
            self.answer(request, {"error": "only a fresh runner can go on in another's place"})
            return
        self.results = {number: (header, base64.b64decode(output)) for number, header, output in state["results"]}
        self.last = state["last"]
        self.mark("busy")
        self.answer(request, {"last": self.last})

    def answer(self, request, header, output=b""):
        reply = self.path("reply-" + request["id"])
        try:
            with open(reply + ".new", "wb") as file:
                file.write(json.dumps(header).encode() + b"\n")
                file.write(output)
            os.rename(reply + ".new", reply)
            bell = os.open(self.path("bell-" + request["client"]), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT):
                print("runner: no answer to %s: %s" % (request["id"], error), file=sys.stderr, flush=True)
            return
        with suppress(OSError):
            os.write(bell, b"!")
        os.close(bell)

    # --- actions ---

    def begin(self, request, number):
        command = request["command"]
        output = Output(int(request["output_limit_bytes"]))
        timeout_s = float(request["timeout_s"])
        if number is not None:
            self.last = number
            self.mark("busy")
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_end, False)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(read_end)
            os.close(write_end)
            # It has run all the same: its number is spent.
            self.finish(number, [request], result(126), ("cannot fork: %s\n" % error).encode())
            return
        if pid == 0:
            become(command, self.workdir, write_end, self.user)
        os.close(write_end)
        self.drained.add(read_end)
        self.poll.register(read_end, select.POLLIN)
        self.running = Running(number, pid, read_end, output, timeout_s)
        self.running.waiting.append(request)

    def finish(self, number, waiting, header, output):
        if number is not None:
            self.results[number] = (header, output)
        while len(self.results) > 1 and (
            len(self.results) > KEPT_RESULTS or sum(len(kept) for _, kept in self.results.values()) > KEPT_BYTES
        ):
            del self.results[min(self.results)]
        for request in waiting:
            self.answer(request, header, output)

    def drain(self, fd, limit=READ_BYTES):
        """Take what is there, for the running action if the pipe is its own. At its end the pipe is closed."""
        while limit > 0:
            try:
                data = os.read(fd, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.poll.unregister(fd)
                self.drained.discard(fd)
                os.close(fd)
                return
            limit -= len(data)
            if self.running is not None and self.running.pipe == fd:
                self.running.output.add(data)

    def reap(self):
        """Collect every dead child: process 1 inherits all orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.running is not None and pid == self.running.pid:
                self.ended(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))

    def ended(self, exit_status):
        running = self.running
        if running.pipe in self.drained:
            self.drain(running.pipe, LEFT_OVER_BYTES)
        duration_s, timed_out = time.monotonic() - running.started, running.killed_at is not None
        output = running.output.value()
        header = result(124 if timed_out else exit_status, duration_s, timed_out, running.output.dropped)
        self.running = None
        self.finish(running.number, running.waiting, header, output)

    def check_deadline(self):
        running, now = self.running, time.monotonic()
        if running is None or (running.killed_at is None and now < running.deadline):
            return
        running.killed_at = running.killed_at or now
        kill_tree(running.pid)
        self.reap()
        if self.running is running and now > running.killed_at + KILL_GRACE_S:
            self.ended(124)


def become(command, workdir, write_end, user):
    """In the child: a new session, our pipe as both outputs, Python's signal changes undone, then bash.

    The folder is found by its name each time, so that no action inherits one that another has removed.
    """
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        if user:
            become_user(user)
        try:
            os.chdir(workdir)
        except OSError as error:
            os.write(2, ("bash: %s; in / instead\n" % error).encode())
        os.execvp("bash", ["bash", "-c", command])
    except BaseException as error:
        os.write(2, ("bash: %s\n" % error).encode())
    finally:
        os._exit(127 if not os.path.exists("/bin/bash") else 126)


def become_user(user):
    """Groups first, for afterwards they cannot be set. A number need not be in /etc/passwd; then its group is root's,
    as with `docker run --user`."""
    import pwd

    name, _, group = user.partition(":")
    try:
        entry = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError:
        if not name.isdigit():
            raise
        entry = None
    gid = int(group) if group else entry.pw_gid if entry else 0
    if entry and not group:
        os.initgroups(entry.pw_name, gid)
    else:
        os.setgroups([gid])
    os.setgid(gid)
    os.setuid(int(name) if name.isdigit() else entry.pw_uid)
    os.environ["HOME"] = entry.pw_dir if entry else "/"


def kill_tree(pid):
    """SIGKILL an action: its descendants, and whatever is left in its session or process group. No other action's.

    All are stopped before one is killed, so that none goes on with the next command because an earlier one has died.
    """
    for _ in range(10):
        doomed = tree_of(pid)
        if not doomed:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for victim in doomed:
                with suppress(ProcessLookupError):
                    os.kill(victim, number)


def tree_of(root):
    processes = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open("/proc/" + name + "/stat", "rb") as file:
                stat = file.read()
                state, parent, group, session = stat[stat.rindex(b")") + 2 :].split()[:4]
                if state not in (b"Z", b"X"):
                    processes[int(name)] = (int(parent), int(group), int(session))
    found = set()
    more = {pid for pid, (_, group, session) in processes.items() if root in (pid, group, session)}
    while more:
        found |= more
        more = {pid for pid, (parent, _, _) in processes.items() if parent in found} - found
    return found - {os.getpid()}


def result(exit_status, duration_s=0.0, timed_out=False, dropped_bytes=0):
    """What is told of an action besides its output."""
    return dict(exit_status=exit_status, duration_s=duration_s, timed_out=timed_out, dropped_bytes=dropped_bytes)


def swallow(fd):
    with suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


if __name__ == "__main__":
    Runner(*sys.argv[1:]).serve()
