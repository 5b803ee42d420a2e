"""A process that waits for the end of its stage, a script of its own: `python -I -S witness_child.py PID`.

It reads a pipe from the stage. A line `watch {...}` says what a death is to be reported with, `well` that the stage
ends in order; anything else is what Python itself says of a crash. When the pipe ends without `well`, this process
becomes `potluck.stage.witness`, which reports. Until then it imports nothing more than it must: it takes 4 MB of its
own. Linux only.
"""

import os
import select
import signal
import sys
import time

LOOK_S = 20.0
"""So often the kernel's counts of processes that it killed for lack of memory are read again: a kill long ago, of
somebody else, explains nothing."""
DEATH_S = 3.0
"""What the stage gets to be gone after its pipe has ended; one that lives on has become another program."""
REPORT_S = 8
"""However the report goes, this process is gone after it."""
CRASH_BYTES = 8192
NEVER_ADJUST = "-900"
"""For the kernel's choice of whom to kill: nearly last."""


def main() -> None:
    """Waits, and becomes the reporter if the stage has died."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the stage, and end this process through it
    prefer_others()
    stage = int(sys.argv[1])
    born = stat_of(stage)[1]
    told, said, well = b"", b"", False
    kills = older = counts(stage)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    rest = b""
    while True:
        if not poll.poll(LOOK_S * 1000):
            older, kills = kills, counts(stage)
            continue
        chunk = os.read(0, 65536)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line == b"well":
                well = True
            elif line.startswith(b"watch "):
                told = line[6:]
                kills = counts(stage)  # it may have been put into a group of its own meanwhile
                older = {name: older.get(name, count) for name, count in kills.items()}
            else:
                said = (said + line + b"\n")[:CRASH_BYTES]
        if well:
            return
        if not chunk:
            break
    ended, status = end_of(stage, born)
    if not ended:
        return
    signal.alarm(REPORT_S)
    os.nice(5)  # whoever takes over on this machine needs the processor more
    os.execv(
        sys.executable,
        [
            sys.executable, "-P", "-m", "potluck.stage.witness",
            told.decode(), (said + rest).replace(b"\0", b"").decode(errors="replace"), str(status), risen(older),
        ],
    )  # fmt: skip


def prefer_others() -> None:
    """Asks the kernel to kill others before this process. It takes rights that a user does not have."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            if int(file.read()) > int(NEVER_ADJUST):
                file.seek(0)
                file.write(NEVER_ADJUST)
    except (OSError, ValueError):
        pass


def read(path: str) -> str:
    """A file's text, empty if it can't be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def counts(pid: int) -> dict[str, int]:
    """Processes that the kernel killed for lack of memory: in the stage's own control groups, and on the machine."""
    found = {}
    for line in read(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        places = []
        if controllers == "":
            places = [("/sys/fs/cgroup", "memory.events"), ("/sys/fs/cgroup/unified", "memory.events")]
        elif "memory" in controllers.split(","):
            places = [("/sys/fs/cgroup/memory", "memory.oom_control")]
        for mount, name in places:
            file = f"{mount}{path}/{name}"
            if path not in ("", "/") and os.path.exists(file):
                found[file] = kills_in(file)
    found["/proc/vmstat"] = kills_in("/proc/vmstat")
    return found


def kills_in(file: str) -> int:
    """What a file says of kills for lack of memory."""
    for line in read(file).splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdigit():
            return int(count)
    return 0


def risen(before: dict[str, int]) -> str:
    """Where a count has risen: in a group of the stage, else on the machine if there is no group to ask."""
    groups = [file for file in before if file != "/proc/vmstat"]
    if any(kills_in(file) > before[file] for file in groups):
        return "group"
    return "machine" if not groups and kills_in("/proc/vmstat") > before["/proc/vmstat"] else ""


def stat_of(pid: int) -> tuple[str, str, int]:
    """A process's state, when it was started, and its exit status in the form of wait(2); all empty if it is gone."""
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], fields[19], int(fields[49])) if len(fields) > 49 else ("", "", 0)


def end_of(pid: int, born: str) -> tuple[bool, int]:
    """Whether the stage has ended, and its status, -1 if whoever started it has fetched that already."""
    until = time.monotonic() + DEATH_S
    while time.monotonic() < until:
        state, began, status = stat_of(pid)
        if state in ("Z", "X") or (began == born and status != 0):
            return True, status
        if began != born:
            return True, -1
        time.sleep(0.01)
    return False, -1


if __name__ == "__main__":
    main()
