"""Which of a machine's network interfaces are used."""

from __future__ import annotations

import socket
from ipaddress import ip_interface
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.runtime.interfaces import (
    Interface,
    Interfaces,
    LeftOut,
    choose,
    choose_for_listener,
    explain_left_out,
    is_loopback,
    read_interfaces,
)
from potluck.wire.errors import SettingsError

VIRTUAL = [
    "docker0", "br-1f0c2a9b7d11", "veth12ab34", "cni0", "flannel.1", "kube-ipvs0", "virbr0", "vnet3", "vmnet8",
    "vboxnet0", "vEthernet (WSL)", "tun0", "tap0", "wg0", "tailscale0", "zt7nnig34o", "utun4", "ppp0", "awdl0", "llw0",
]  # fmt: skip


def interface(name: str, *addresses: str, up: bool = True) -> Interface:
    return Interface(name, tuple(map(ip_interface, addresses)), up)


LO = interface("lo", "127.0.0.1/8", "::1/128")
ETH0 = interface("eth0", "192.168.1.10/24")
WLAN0 = interface("wlan0", "192.168.1.11/24")
DOCKER0 = interface("docker0", "172.17.0.1/16")


def names(chosen: Interfaces) -> list[str]:
    return [one.name for one in chosen.used]


@pytest.mark.parametrize("name", VIRTUAL)
def test_interfaces_of_containers_machines_inside_machines_and_vpns_are_left_out_with_a_reason(
    name: str,
) -> None:
    chosen = choose([interface(name, "10.0.0.1/24"), ETH0])
    assert names(chosen) == ["eth0"]
    assert [one.name for one in chosen.left_out] == [name]
    assert chosen.left_out[0].reason.startswith("for ")


@pytest.mark.parametrize(
    "name",
    [
        "eth0",
        "en0",
        "enp3s0",
        "eno1",
        "wlan0",
        "wlp2s0",
        "br0",
        "bond0",
        "bridge0",
        "Wi-Fi",
        "Ethernet 2",
        "team0",
    ],
)
def test_interfaces_of_the_house_are_used(name: str) -> None:
    assert names(choose([interface(name, "10.0.0.1/24")])) == [name]


def test_loopback_down_and_without_address_are_left_out_with_a_reason() -> None:
    found = [
        LO,
        interface("eth1", "10.0.0.1/24", up=False),
        interface("eth2"),
        interface("eth3", "fe80::1/64"),
        ETH0,
    ]
    chosen = choose(found)
    assert names(chosen) == ["eth0"]
    assert chosen.left_out == (
        LeftOut("lo", "this machine only"),
        LeftOut("eth1", "down"),
        LeftOut("eth2", "no address"),
        LeftOut("eth3", "no address"),
    )


def test_wired_comes_before_wi_fi_and_others_between() -> None:
    found = [
        WLAN0,
        interface("eth10", "10.1.0.1/24"),
        interface("br0", "10.2.0.1/24"),
        ETH0,
        interface("eth2", "10.3.0.1/24"),
    ]
    assert names(choose(found)) == ["eth0", "eth2", "eth10", "br0", "wlan0"]


def test_ipv4_comes_before_ipv6_within_an_interface_and_among_them() -> None:
    both = interface("wlan0", "fd00::2/64", "fe80::1/64", "192.168.1.11/24", "2001:db8::1/64")
    six = interface("eth0", "fd00::3/64")
    chosen = choose([six, both])
    assert names(chosen) == ["wlan0", "eth0"]
    assert [str(address.ip) for address in chosen.used[0].addresses] == [
        "192.168.1.11",
        "fd00::2",
        "2001:db8::1",
    ]


def test_an_address_that_a_machine_gave_itself_is_the_last_resort() -> None:
    own = interface("eth1", "169.254.7.7/16")
    assert names(choose([own, ETH0])) == ["eth0"]
    assert choose([own, ETH0]).left_out == (LeftOut("eth1", "only an address it gave itself"),)
    assert choose([own, LO]).used == (own,)
    mixed = choose([interface("eth1", "169.254.7.7/16", "10.0.0.1/24")])
    assert [str(address.ip) for address in mixed.addresses] == ["10.0.0.1"]


@pytest.mark.parametrize("name", ["docker0", "eth0", "lo", "veth0"])
def test_an_interface_that_is_named_is_used_whatever_it_is(name: str) -> None:
    found = [LO, ETH0, DOCKER0, interface("veth0", "10.9.0.1/24", up=False)]
    chosen = choose(found, name)
    assert names(chosen) == [name]
    assert chosen.addresses[0].version == 4
    assert {one.name for one in chosen.left_out} == {one.name for one in found} - {name}


def test_a_named_interface_that_does_not_exist_is_an_error_that_lists_what_does() -> None:
    with pytest.raises(SettingsError) as caught:
        choose([LO, ETH0, WLAN0, DOCKER0], "eth7")
    for words in (
        "eth7",
        "eth0 (192.168.1.10)",
        "wlan0 (192.168.1.11)",
        "docker0 (for containers)",
        "lo (this machine only)",
    ):
        assert words in str(caught.value)


def test_a_named_interface_without_an_address_is_an_error_that_lists_what_has_one() -> None:
    with pytest.raises(
        SettingsError, match=r"eth2 has no address that can be used.*eth0 \(192\.168\.1\.10\)"
    ):
        choose([interface("eth2", "fe80::1/64"), ETH0], "eth2")


def test_a_machine_without_interfaces_uses_none() -> None:
    assert choose([]) == Interfaces()
    with pytest.raises(SettingsError, match="has no network interface"):
        choose([], "eth0")


def test_a_listener_on_every_address_is_reached_by_the_chosen_ones_of_its_kind() -> None:
    found = [LO, DOCKER0, interface("eth0", "192.168.1.10/24", "fd00::2/64"), interface("eth1", "fd01::2/64")]
    for any_address in ("0.0.0.0", "*"):
        assert [str(one.ip) for one in choose_for_listener(found, None, any_address).addresses] == [
            "192.168.1.10"
        ]
    both = choose_for_listener(found, None, "::")
    assert [str(one.ip) for one in both.addresses] == ["192.168.1.10", "fd00::2", "fd01::2"]


def test_a_listener_on_one_address_is_reached_by_that_one_even_on_an_interface_that_would_be_left_out() -> (
    None
):
    found = [LO, ETH0, DOCKER0]
    assert choose_for_listener(found, None, "172.17.0.1").used == (DOCKER0,)
    assert choose_for_listener(found, "eth0", "172.17.0.1").used == ()
    assert choose_for_listener(found, None, "203.0.113.7").used == ()
    assert choose_for_listener(found, None, "desktop.lan").used == ()


@pytest.mark.parametrize(("address", "expected"), [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True),
                                                   ("localhost", True), ("0.0.0.0", False), ("192.168.1.1", False),
                                                   ("*", False)])  # fmt: skip
def test_the_loopback_is_known_by_its_addresses(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_the_interface_that_leads_to_an_address_is_the_one_on_whose_network_it_is() -> None:
    chosen = choose([ETH0, interface("eth1", "10.1.0.1/16")])
    held = map(chosen.holding, ["192.168.1.77", "10.1.200.1", "10.2.0.1", "no"])
    assert [one and one.name for one in held] == ["eth0", "eth1", None, None]


def test_what_is_left_out_is_grouped_by_its_reason_and_has_an_end() -> None:
    left_out = [LeftOut(f"veth{n}", "for containers") for n in range(40)] + [LeftOut("wg0", "for a VPN")]
    text = explain_left_out(left_out)
    assert text == "veth0, veth1, veth2, veth3, veth4, veth5 and 34 more (for containers), wg0 (for a VPN)"


def test_facts_are_read_from_psutil_as_linux_and_macos_give_them() -> None:
    def entry(address: str, netmask: str | None) -> SimpleNamespace:
        return SimpleNamespace(family=socket.AF_INET, address=address, netmask=netmask)

    found = read_interfaces(
        {
            "eth0": [
                entry("192.168.1.10", "255.255.255.0"),
                entry("fe80::fc:1%eth0", "ffff:ffff:ffff:ffff::"),
                entry("02:fc:00:00:00:01", None),
            ],
            "utun0": [entry("fd00::1", None)],
            "eth1": [],
        },
        {"eth0": SimpleNamespace(isup=True), "eth1": SimpleNamespace(isup=False)},
    )
    assert found == (
        interface("eth0", "192.168.1.10/24", "fe80::fc:1/64"),
        interface("utun0", "fd00::1/128"),
        interface("eth1", up=False),
    )


IPS = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(
    lambda ip: ip_interface(f"{ip}/{ip.max_prefixlen // 2}")
)
MACHINES = st.lists(
    st.builds(
        Interface,
        st.sampled_from(["lo", "eth0", "eth1", "wlan0", "docker0", "tun0", "br0", "en5", "wg1"]),
        st.lists(IPS, max_size=3).map(tuple),
        st.booleans(),
    ),
    unique_by=lambda one: one.name,
)


@given(MACHINES)
def test_every_interface_is_either_used_or_left_out_for_a_reason(found: list[Interface]) -> None:
    chosen = choose(found)
    assert sorted(names(chosen) + [one.name for one in chosen.left_out]) == sorted(one.name for one in found)
    assert all(one.reason for one in chosen.left_out)
    assert all(one.addresses and one.up for one in chosen.used)
    assert not any(address.ip.is_loopback for address in chosen.addresses)


@given(MACHINES, st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_interfaces(
    found: list[Interface], chance: Random
) -> None:
    shuffled = list(found)
    chance.shuffle(shuffled)
    assert choose(shuffled).used == choose(found).used
