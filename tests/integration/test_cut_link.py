"""The cable between two neighbours of a chain is cut in the middle of answers, and both still reach the broker.

Three stages and the broker are hosts of their own (network namespaces). Open connections and new ones are hit alike, in
both directions. It is cut in two ways:

- silently: each of the two takes the other to be at a hardware address that nobody has, so frames leave and never
  arrive, as in a switch that has lost a table, and nobody is told;
- `ip link set cable down`: the two have a cable of their own and no other way to each other. One end finds no route any
  more, the other no carrier.
"""

from __future__ import annotations

import ast
import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from namespaces import Host, Process, household, ip
from potluck.wire.messages import StateView

pytestmark = [pytest.mark.root, pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(300)]

NOBODY = "02:00:00:00:00:fe"
"""A hardware address of no host."""
NEW_TOKENS = 120
CUT_AT = 15
"""The token after which the link is cut."""
WITHIN_S = 150.0
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()"


@dataclass(frozen=True)
class Asked:
    """One request, as options of `potluck infer`."""

    prompt: str
    options: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        return ("potluck", "infer", "--raw", "--prompt", self.prompt, "-n", str(NEW_TOKENS), *self.options)


ASKED = (
    Asked("Once upon a time there was a clockmaker who", ("--temperature", "0")),
    Asked("The history of the bicycle begins in", ("--temperature", "0.8", "--seed", "7")),
    Asked("1, 2, 3, 4, 5, 6, 7, 8,", ("--temperature", "0")),
)


def lose_the_way(one: Host, other: Host) -> None:
    """From now on neither hears the other."""
    for here, there in ((one, other), (other, one)):
        ip(
            "ip", "-n", here.namespace, "neigh", "replace", there.address, "lladdr", NOBODY, "dev", "eth0",
            "nud", "permanent",
        )  # fmt: skip


def take_down(one: Host, other: Host) -> None:
    """The same, and `one` knows it."""
    one.part()


def reaches(one: Host, address: str, port: str) -> bool:
    return one.run("python3", "-c", CONNECT, address, port).code == 0


def state(host: Host, broker: str) -> StateView:
    asked = host.run("potluck", "ps", "--broker", broker, "--json")
    assert asked.code == 0, asked.err
    return msgspec.json.decode(asked.out, type=StateView)


def neighbours(view: StateView) -> set[tuple[str, str]]:
    """Pairs of devices between which a chain sends its activations."""
    chains: dict[int, list[str]] = {}
    for stage in view.stages:
        if stage.chain is not None:
            chains.setdefault(stage.chain, []).append(stage.device)
    return {pair for devices in chains.values() for pair in pairwise(devices)}


def tokens_of(stream: Process) -> list[str]:
    """The pieces of an answer by `--times`; AssertionError if their numbers are not 1, 2, 3 and so on."""
    found = [re.match(r"Token (\d+): .*? ms(?: \(pipeline fill\))?  (.*)$", line) for line in stream.lines]
    numbered = [(int(line[1]), ast.literal_eval(line[2])) for line in found if line is not None]
    assert [number for number, _ in numbered] == list(range(1, len(numbered) + 1)), stream.output
    return [text for _, text in numbered]


@pytest.mark.parametrize("cut", [lose_the_way, take_down])
def test_a_cut_link_between_two_stages_costs_no_token_and_is_not_used_again(
    cut: Callable[[Host, Host], None], smollm2_path: Path, tmp_path: Path
) -> None:
    running: list[Process] = []
    env = {"POTLUCK_CACHE_DIR": str(tmp_path / "cache")}

    def start(host: Host, *command: str | Path) -> Process:
        running.append(host.start(*command, **env))
        return running[-1]

    with household(4) as (home, *stages):
        if cut is take_down:
            stages[0].join(stages[1])
        broker = start(
            home, "potluck-broker", "--model", smollm2_path, "--listen-address", home.address, "--no-discovery",
            "--http", "off", "--stages", "3", "--plan", "even", "--exact", "--slots", "4", "--context", "256",
        )  # fmt: skip
        broker.wait_for("Stages and clients")
        hosts = dict(zip(("attic", "cellar", "study"), stages, strict=True))
        for name, host in hosts.items():
            start(
                host, "potluck-stage", home.address, "--model", smollm2_path, "--name", name, "--threads", "1"
            )
        broker.wait_for("Chain 0 serves")
        before = state(home, home.address)
        assert neighbours(before) == {("attic", "cellar"), ("cellar", "study")}

        undisturbed = []
        for asked in ASKED:
            answer = home.run(*asked.words, "--broker", home.address, "--json", within_s=WITHIN_S)
            assert answer.code == 0, answer.err
            undisturbed.append(json.loads(answer.out))
        streams = [start(home, *asked.words, "--broker", home.address, "--times") for asked in ASKED]
        for stream in streams:
            stream.wait_for(f"^Token {CUT_AT}:")
        cut(hosts["attic"], hosts["cellar"])
        had = [len(tokens_of(stream)) for stream in streams]
        assert max(had) < NEW_TOKENS // 2, "the cut is in the middle of the answers"
        ports = {stage.device: stage.endpoint.rpartition(":")[2] for stage in before.stages}
        assert not reaches(hosts["attic"], hosts["cellar"].address, ports["cellar"])
        assert not reaches(hosts["cellar"], hosts["attic"].address, ports["attic"])
        for name, port in ports.items():
            assert reaches(hosts[name], home.address, "7946")
            assert reaches(hosts["study"], hosts[name].address, port), (
                f"only one link is cut, not that to {name}"
            )

        for stream, alone in zip(streams, undisturbed, strict=True):
            stream.wait_for("tokens: first after", WITHIN_S)
            pieces = tokens_of(stream)
            assert len(pieces) == alone["tokens"], stream.output
            assert "".join(pieces) == alone["text"]
        view = state(home, home.address)
        assert view.ready, view.detail
        assert not neighbours(view) & {("attic", "cellar"), ("cellar", "attic")}
        assert {stage.device for stage in view.stages} == set(hosts), "both beat, and nobody is lost"
        again = home.run(*ASKED[0].words, "--broker", home.address, "--json", within_s=WITHIN_S)
        assert json.loads(again.out)["text"] == undisturbed[0]["text"]

        for process in running:
            process.end(signal.SIGTERM)
            assert "Traceback" not in process.output
