"""Machines on a network of their own: Linux network namespaces joined by a switch (root, iproute2).

    with household(3) as (desktop, laptop, mini):
        broker = desktop.start("potluck-broker", "--model", "m.gguf")
        broker.wait_for("Can be found")
        laptop.limit(10)                     # its cable carries 10 Mbit/s, both ways
        print(laptop.run("potluck", "ps").out)
        laptop.down()                        # the cable is pulled out

Each host is a namespace whose `eth0` (10.77.x.y/24) leads to one bridge in a namespace that stands for the switch. This
machine's own network takes no part and is not touched. Names are new for every household. On leaving, whatever still
runs inside is killed and the namespaces are removed, however the test ended. Nothing here sleeps: `wait_for` returns
with the line of output that was waited for.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from acceptance.cluster_world import COMMANDS, DEADLINE_S, Ended, command_line, environment

NETWORK = "10.77"
CABLE = "cable"
KEPT_BYTES = "16kb"
"""What a limited link lets through at once: more than a timer tick's worth of 100 Mbit/s."""
QUEUED = "400ms"
"""How long a frame may wait in front of a limited link before it is dropped."""


class Process:
    """A command inside a namespace, and everything it has written so far, errors included."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, within_s: float = DEADLINE_S, *, since: int = 0) -> str:
        """The first line from number `since` on that the pattern is found in. AssertionError with all output."""
        end = time.monotonic() + within_s
        seen = since
        with self._news:
            while True:
                for line in self.lines[seen:]:
                    if re.search(pattern, line):
                        return line.rstrip()
                seen = max(seen, len(self.lines))
                left = end - time.monotonic()
                assert not self._over, f"it ended without {pattern!r}:\n{self.output}"
                assert left > 0, f"no {pattern!r} within {within_s:g} s:\n{self.output}"
                self._news.wait(left)

    def end(self, number: signal.Signals = signal.SIGTERM, within_s: float = DEADLINE_S) -> int:
        """Sends a signal and waits. Returns the exit code."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
        code = self._process.wait(within_s)
        self._reader.join(within_s)
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                with self._news:
                    self.lines.append(line)
                    self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()


@dataclass
class Host:
    """One machine. `address` is that of its eth0; `port` is the switch's end of the cable."""

    namespace: str
    address: str
    switch: str
    port: str

    def argv(self, *command: str | Path) -> list[str]:
        """A command's words so that it runs inside; Potluck's commands by their names."""
        words = list(map(str, command))
        if words[0] in COMMANDS:
            words = command_line(words[0], *words[1:])
        return ["ip", "netns", "exec", self.namespace, *words]

    def start(self, *command: str | Path, **env: str) -> Process:
        """Begins a command inside."""
        return Process(self.argv(*command), environment(**env))

    def run(self, *command: str | Path, within_s: float = DEADLINE_S, **env: str) -> Ended:
        """Runs a command inside to its end."""
        begin = time.monotonic()
        done = subprocess.run(
            self.argv(*command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            env=environment(**env),
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)

    def limit(self, mbit: float) -> None:
        """Lets this host's link carry so many Mbit/s in each direction; a new limit takes the old one's place."""
        for namespace, device in self._ends:
            ip(
                "tc", "-n", namespace, "qdisc", "replace", "dev", device, "root",
                "tbf", "rate", f"{mbit:g}mbit", "burst", KEPT_BYTES, "latency", QUEUED,
            )  # fmt: skip

    def unlimit(self) -> None:
        """Takes the limit away."""
        for namespace, device in self._ends:
            ip("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    def down(self) -> None:
        """Pulls the cable out at the switch: the host keeps its address and hears nothing."""
        ip("ip", "-n", self.switch, "link", "set", self.port, "down")

    def up(self) -> None:
        """Puts the cable back."""
        ip("ip", "-n", self.switch, "link", "set", self.port, "up")

    def join(self, other: Host) -> None:
        """A cable of their own between two hosts, `cable` at either end; no other way leads from one to the other."""
        ends = ((self, other), (other, self))
        ip(
            "ip", "-n", self.namespace, "link", "add", CABLE, "type", "veth",
            "peer", "name", CABLE, "netns", other.namespace,
        )  # fmt: skip
        for here, _ in ends:
            ip("ip", "-n", here.namespace, "link", "set", CABLE, "up")
        for here, there in ends:
            to = f"{there.address}/32"
            ip("ip", "-n", here.namespace, "route", "add", to, "dev", CABLE, "src", here.address)
            ip("ip", "-n", here.namespace, "route", "add", "unreachable", to, "metric", "9999")

    def part(self) -> None:
        """Takes the link at this end of its own cable down; the other end loses its carrier."""
        ip("ip", "-n", self.namespace, "link", "set", CABLE, "down")

    def add_interface(self, name: str, address: str) -> None:
        """One more interface that leads nowhere, e.g. docker0 with 172.17.0.1/16."""
        end = f"x{secrets.token_hex(3)}"
        ip(
            "ip",
            "-n",
            self.namespace,
            "link",
            "add",
            name,
            "type",
            "veth",
            "peer",
            "name",
            end,
            "netns",
            self.switch,
        )
        ip("ip", "-n", self.namespace, "addr", "add", address, "dev", name)
        ip("ip", "-n", self.namespace, "link", "set", name, "up")
        ip("ip", "-n", self.switch, "link", "set", end, "up")

    @property
    def _ends(self) -> list[tuple[str, str]]:
        return [(self.namespace, "eth0"), (self.switch, self.port)]


@contextlib.contextmanager
def household(hosts: int) -> Iterator[list[Host]]:
    """So many machines on one network. Skips the test where that can't be: not root, or no iproute2."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        why = "not root" if os.geteuid() != 0 else f"{' and '.join(missing)} of iproute2 missing"
        pytest.skip(f"NOTHING WAS TESTED IN NETWORK NAMESPACES: {why}")
    tag = f"potluck-{secrets.token_hex(4)}"
    switch = f"{tag}-switch"
    subnet = secrets.randbelow(254) + 1
    made: list[str] = []
    try:
        _add(switch, made)
        ip("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        ip("ip", "-n", switch, "link", "set", "br0", "up")
        yield [
            _host(f"{tag}-{number}", f"{NETWORK}.{subnet}.{number}", switch, made)
            for number in range(1, hosts + 1)
        ]
    finally:
        for namespace in made:
            _remove(namespace)


def _host(namespace: str, address: str, switch: str, made: list[str]) -> Host:
    _add(namespace, made)
    port = f"p{address.rpartition('.')[2]}"
    link = ["link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch]
    ip("ip", "-n", namespace, *link)
    ip("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("ip", "-n", namespace, "link", "set", "eth0", "up")
    ip("ip", "-n", switch, "link", "set", port, "master", "br0")
    ip("ip", "-n", switch, "link", "set", port, "up")
    return Host(namespace, address, switch, port)


def _add(namespace: str, made: list[str]) -> None:
    ip("ip", "netns", "add", namespace)
    made.append(namespace)
    ip("ip", "-n", namespace, "link", "set", "lo", "up")


def _remove(namespace: str) -> None:
    inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", namespace], check=False)


def ip(*words: str) -> None:
    """Runs one command of iproute2; AssertionError with what it said."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
