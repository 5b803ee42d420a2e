"""Brokers, stages and commands that find each other on a network of namespaces, by multicast DNS alone."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.cluster_world import DEADLINE_S
from namespaces import Host, Process, household, ip
from tiny_models import write_tiny

pytestmark = [pytest.mark.root, pytest.mark.slow]

EVEN = ("--plan", "even", "--http", "off")


class Home:
    """Three machines and a model file that all of them have."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.model = write_tiny(folder / "tiny.gguf", layers=6)
        self.running: list[Process] = []

    def broker(self, host: Host, *options: str | Path, model: Path | None = None) -> Process:
        """A broker that can be found."""
        started = host.start("potluck-broker", "--model", model or self.model, *EVEN, *options, **self.env)
        self.running.append(started)
        started.wait_for("Can be found as")
        return started

    def stage(self, host: Host, name: str, *options: str | Path) -> Process:
        started = host.start(
            "potluck-stage", "--model", self.model, "--name", name, "--threads", "1", *options, **self.env
        )
        self.running.append(started)
        return started

    @property
    def env(self) -> dict[str, str]:
        return {"POTLUCK_CACHE_DIR": str(self.folder / "cache")}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    with household(3) as hosts:
        made = Home(hosts, tmp_path)
        yield made
        for process in reversed(made.running):
            assert process.end() in (0, -signal.SIGKILL), process.output
            assert "Traceback" not in process.output, process.output


def test_three_hosts_find_each_other_by_multicast_alone_and_answer_a_prompt(home: Home) -> None:
    desktop, laptop, mini = home.hosts
    broker = home.broker(desktop, "--name", "desktop", "--stages", "2")
    stages = [home.stage(laptop, "laptop"), home.stage(mini, "mini")]
    for stage in stages:
        line = stage.wait_for("Found")
        assert line.endswith(f"Found broker desktop with tiny at {desktop.address} through eth0.")
    broker.wait_for("Chain 0 serves")
    for host in home.hosts[1:]:
        asked = host.run(
            "potluck", "infer", "--prompt", "hello world", "--temperature", "0", "-n", "5", "--json"
        )
        assert asked.code == 0, asked.err
        assert json.loads(asked.out)["tokens"] == 5
    here = desktop.run("potluck", "ps")
    assert here.code == 0, here.err
    assert f"{laptop.address}:" in here.out
    assert f"{mini.address}:" in here.out
    assert "Found" not in here.err  # it asked its own machine first


def test_a_stage_that_finds_nobody_says_what_it_tried_and_joins_the_broker_that_comes(home: Home) -> None:
    desktop, laptop, mini = home.hosts
    laptop.add_interface("docker0", "172.17.0.1/16")
    laptop.add_interface("eth1", "192.168.9.3/24")
    stage = home.stage(laptop, "laptop", "--discovery-interval", "2", "--peer", mini.address)
    stage.wait_for("Still looking")
    for words in (
        "No broker found in 2 s.",
        f"eth0 ({laptop.address}), eth1 (192.168.9.3)",
        "docker0 (for containers)",
        f"{mini.address}, 127.0.0.1: nobody there takes a connection",
        "potluck-stage 192.168.1.10",
    ):
        assert words in stage.output
    home.broker(desktop)
    assert stage.wait_for("joined the broker").endswith(
        f"joined the broker at {desktop.address}:7946 (0.1.0)."
    )


def test_a_command_that_finds_nobody_ends_with_status_3(home: Home) -> None:
    ended = home.hosts[0].run("potluck", "ps")
    assert ended.code == 3
    assert f"eth0 ({home.hosts[0].address})" in ended.err
    assert "Traceback" not in ended.err


def test_of_two_brokers_the_one_with_the_stage_s_model_is_taken_and_a_command_lists_both(home: Home) -> None:
    desktop, laptop, mini = home.hosts
    other = write_tiny(home.folder / "other.gguf", seed=1)
    home.broker(desktop, "--name", "attic", model=other)
    home.broker(laptop, "--name", "desktop")
    stage = home.stage(mini, "mini")
    assert "broker desktop with tiny" in stage.wait_for("Found")
    stage.wait_for("joined the broker")
    asked = mini.run("potluck", "ps", "--json")
    assert json.loads(asked.out)["model"] == "other"
    for broker in (f"attic, other, {desktop.address}", f"desktop, tiny, {laptop.address}"):
        assert broker in asked.err


def test_a_stage_goes_to_another_broker_when_its_own_is_gone(home: Home) -> None:
    desktop, laptop, mini = home.hosts
    first = home.broker(desktop)
    stage = home.stage(mini, "mini", "--discovery-interval", "1")
    stage.wait_for(f"joined the broker at {desktop.address}")
    first.end(signal.SIGKILL)
    second = home.broker(laptop)
    stage.wait_for(f"joined the broker at {laptop.address}")
    second.wait_for("Chain 0 serves")


def test_a_named_interface_is_listened_on_and_found_on_whatever_it_is_called(home: Home) -> None:
    desktop, laptop, _ = home.hosts
    desktop.add_interface("docker0", "172.17.0.1/16")
    broker = home.broker(desktop, "--network-interface", "docker0")
    assert "Stages and clients: 172.17.0.1:7946" in broker.output
    assert broker.wait_for("Can be found as").endswith("docker0 (172.17.0.1).")
    wrong = laptop.run("potluck-stage", "--network-interface", "eth7")
    assert wrong.code == 2
    assert f"eth0 ({laptop.address})" in wrong.err


def test_a_broker_can_be_found_again_once_its_cable_is_back(home: Home) -> None:
    desktop, laptop, _ = home.hosts
    home.broker(desktop)
    desktop.down()
    stage = home.stage(laptop, "laptop", "--discovery-interval", "1")
    stage.wait_for("Still looking")
    desktop.up()
    stage.wait_for("joined the broker", DEADLINE_S)


def test_a_machine_without_a_network_has_one_warning_and_serves_itself(home: Home) -> None:
    desktop = home.hosts[0]
    desktop.down()
    broker = desktop.start("potluck-broker", "--model", home.model, *EVEN, **home.env)
    home.running.append(broker)
    assert "there is no network interface" in broker.wait_for("can't be found by itself")
    stage = home.stage(desktop, "here")
    assert stage.wait_for("Found").endswith("Found a broker at 127.0.0.1, this machine.")
    broker.wait_for("Chain 0 serves")
    assert broker.output.count("WARNING") == 1


def test_a_house_of_ipv6_alone_works_too(home: Home) -> None:
    desktop, laptop, _ = home.hosts
    for number, host in enumerate((desktop, laptop), start=1):
        ip("ip", "-n", host.namespace, "addr", "flush", "dev", "eth0")
        ip("ip", "-n", host.namespace, "addr", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
    broker = home.broker(desktop, "--network-interface", "eth0")
    stage = home.stage(laptop, "laptop")
    assert stage.wait_for("Found").endswith("at fd77::1 through eth0.")
    broker.wait_for("Chain 0 serves")
    asked = laptop.run("potluck", "infer", "--prompt", "hello", "-n", "3", "--json")
    assert asked.code == 0, asked.err


def test_a_limited_link_still_carries_and_is_free_again(home: Home) -> None:
    desktop, laptop, _ = home.hosts
    home.broker(desktop)
    laptop.limit(1)
    laptop.limit(0.5)
    assert laptop.run("potluck", "ps").code == 0
    laptop.unlimit()
    assert laptop.run("potluck", "ps").code == 0
