"""Which broker of those on the network is joined, what of a stranger's words is believed, and what is said."""

from __future__ import annotations

from ipaddress import ip_interface
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.runtime.finding import (
    ADDRESSES,
    FINGERPRINT_CHARS,
    SERVICE,
    TEXT_BYTES,
    Advert,
    Broker,
    Search,
    decide,
    nothing_found,
    read_answer,
    several,
)
from potluck.runtime.interfaces import Interface, Interfaces, LeftOut
from potluck.wire import limits

ETH0 = Interface("eth0", (ip_interface("192.168.1.20/24"),))
WLAN0 = Interface("wlan0", (ip_interface("10.0.0.20/24"),))
HERE = Interfaces((ETH0, WLAN0), (LeftOut("docker0", "for containers"),))
LLAMA, QWEN = "a" * 64, "b" * 64


def broker(
    name: str,
    *addresses: str,
    fingerprint: str = LLAMA,
    model: str = "llama",
    port: int = 7946,
    protocol: int = limits.PROTOCOL_VERSION,
) -> Broker:
    advert = Advert(name, model, fingerprint[:FINGERPRINT_CHARS], 30, "0.1.0", protocol)
    return Broker(advert, port, addresses or ("192.168.1.10",))


def open_at(*brokers: Broker) -> set[tuple[str, int]]:
    return {(host, one.port) for one in brokers for host in one.addresses}


# ---- which broker


def test_the_only_broker_is_taken_with_its_address_and_our_interface() -> None:
    one = broker("desktop")
    verdict = decide([one], HERE, [], open_at(one))
    assert verdict.taken is not None
    assert (verdict.taken.address, verdict.taken.interface) == ("192.168.1.10:7946", "eth0")
    assert str(verdict.taken) == "broker desktop with llama at 192.168.1.10 through eth0"
    assert verdict.as_good == verdict.refused == ()
    assert several(verdict, "") == ""


def test_of_several_the_only_one_whose_model_is_at_hand_is_taken_without_a_word() -> None:
    brokers = [broker("attic"), broker("desktop", "192.168.1.11", fingerprint=QWEN, model="qwen")]
    verdict = decide(brokers, HERE, [QWEN], open_at(*brokers))
    assert verdict.taken is not None
    assert verdict.taken.broker.advert.name == "desktop"
    assert several(verdict, "") == ""


def test_a_broker_on_a_network_of_ours_comes_before_one_that_is_not() -> None:
    brokers = [broker("attic", "203.0.113.7"), broker("desktop")]
    verdict = decide(brokers, HERE, [], open_at(*brokers))
    assert verdict.taken is not None
    assert verdict.taken.broker.advert.name == "desktop"


def test_a_model_at_hand_matters_more_than_the_network() -> None:
    brokers = [broker("attic", "203.0.113.7", fingerprint=QWEN), broker("desktop")]
    verdict = decide(brokers, HERE, [QWEN], open_at(*brokers))
    assert verdict.taken is not None
    assert (verdict.taken.broker.advert.name, verdict.taken.interface) == ("attic", "")


def test_where_several_remain_the_first_by_name_is_taken_and_all_are_listed() -> None:
    brokers = [broker("desktop"), broker("attic", "192.168.1.11", port=7000), broker("far", "203.0.113.7")]
    verdict = decide(brokers, HERE, [], open_at(*brokers))
    text = several(verdict, "To name one: potluck-stage 192.168.1.10")
    assert text == (
        "2 brokers are on this network: attic, llama, 192.168.1.11:7000; desktop, llama, 192.168.1.10. "
        "Taking attic. To name one: potluck-stage 192.168.1.10"
    )


def test_without_a_model_that_fits_a_broker_is_taken_all_the_same() -> None:
    one = broker("desktop")
    assert decide([one], HERE, [QWEN], open_at(one)).taken is not None


@pytest.mark.parametrize(
    ("protocol", "words"), [(0, "speaks protocol ?"), (limits.PROTOCOL_VERSION + 1, "upgrade Potluck here")]
)
def test_a_broker_of_another_protocol_is_refused_and_named(protocol: int, words: str) -> None:
    one = broker("desktop", protocol=protocol)
    verdict = decide([one], HERE, [LLAMA], open_at(one))
    assert verdict.taken is None
    assert words in verdict.refused[0][1]


def test_a_broker_that_takes_no_connection_is_refused_with_the_port_to_open() -> None:
    verdict = decide([broker("desktop")], HERE, [], set())
    assert verdict.taken is None
    assert "TCP port 7946" in verdict.refused[0][1]


def test_of_a_broker_s_addresses_one_on_our_preferred_interface_is_dialled() -> None:
    one = broker("desktop", "203.0.113.7", "fd00::1", "10.0.0.10", "192.168.1.10")
    verdict = decide([one], HERE, [], open_at(one))
    assert verdict.taken is not None
    assert (verdict.taken.host, verdict.taken.interface) == ("192.168.1.10", "eth0")
    verdict = decide([one], HERE, [], {("fd00::1", 7946), ("10.0.0.10", 7946)})
    assert verdict.taken is not None
    assert (verdict.taken.host, verdict.taken.interface) == ("10.0.0.10", "wlan0")
    verdict = decide([one], HERE, [], {("fd00::1", 7946)})
    assert verdict.taken is not None
    assert verdict.taken.address == "[fd00::1]:7946"


def test_a_stranger_can_t_send_us_to_our_own_loopback() -> None:
    one = broker("desktop", "127.0.0.1")
    assert decide([one], HERE, [], open_at(one)).taken is None
    lo = Interfaces((Interface("lo", (ip_interface("127.0.0.1/8"),)),))
    assert decide([one], lo, [], open_at(one)).taken is not None


@given(
    st.lists(
        st.builds(
            broker,
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(["192.168.1.10", "192.168.1.11", "203.0.113.7", "127.0.0.1"]),
            fingerprint=st.sampled_from([LLAMA, QWEN]),
            protocol=st.sampled_from([limits.PROTOCOL_VERSION, 99]),
        ),
        max_size=5,
        unique_by=lambda one: (one.advert.name, one.addresses),
    ),
    st.sets(st.sampled_from([LLAMA, QWEN])),
    st.randoms(use_true_random=False),
)
def test_the_verdict_does_not_depend_on_who_answered_first(
    brokers: list[Broker], held: set[str], chance: Random
) -> None:
    verdict = decide(brokers, HERE, held, open_at(*brokers))
    shuffled = list(brokers)
    chance.shuffle(shuffled)
    again = decide(shuffled, HERE, held, open_at(*brokers))
    assert (verdict.taken, verdict.as_good) == (again.taken, again.as_good)
    if verdict.taken is not None:
        assert verdict.taken.broker.advert.protocol == limits.PROTOCOL_VERSION


# ---- what is believed


def texts(advert: Advert) -> dict[bytes, bytes | None]:
    return {key.encode(): value.encode() for key, value in advert.texts().items()}


def test_what_a_broker_advertises_is_what_others_read() -> None:
    advert = Advert("desktop", "SmolLM2", LLAMA, 30, "0.1.0")
    read = read_answer(f"desktop.{SERVICE}", 7946, ["192.168.1.10"], texts(advert))
    assert read == broker("desktop", model="SmolLM2")


def test_a_long_name_of_a_model_is_cut_between_two_letters() -> None:
    read = read_answer(f"x.{SERVICE}", 1, ["10.0.0.1"], texts(Advert("x", "ü" * 200)))
    assert read is not None
    assert read.advert.model == "ü" * (TEXT_BYTES // 2)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("desktop.fritz.box", "desktop-fritz-box"),
        ("a\x00b\n", "a-b-"),
        ("ü" * 100, "ü" * 31),
        ("", "potluck"),
        ("Büro 2", "Büro 2"),
    ],
)
def test_a_name_becomes_one_label_that_dns_takes(name: str, label: str) -> None:
    assert Advert(name).label == label


@pytest.mark.parametrize("port", [None, 0, 65_536, -1])
def test_an_answer_without_a_port_is_none(port: int | None) -> None:
    assert read_answer(f"x.{SERVICE}", port, ["10.0.0.1"], {}) is None


@pytest.mark.parametrize("addresses", [[], ["0.0.0.0"], ["224.0.0.251"], ["fe80::1"], ["no address"], ["::"]])
def test_an_answer_without_an_address_to_dial_is_none(addresses: list[str]) -> None:
    assert read_answer(f"x.{SERVICE}", 7946, addresses, {}) is None


def test_there_is_an_end_to_a_stranger_s_addresses() -> None:
    read = read_answer(f"x.{SERVICE}", 7946, [f"10.0.{n}.1" for n in range(200)], {})
    assert read is not None
    assert len(read.addresses) == ADDRESSES


@given(
    st.text(max_size=80),
    st.one_of(st.none(), st.integers(-1, 70_000)),
    st.lists(st.one_of(st.text(max_size=20), st.ip_addresses().map(str)), max_size=20),
    st.dictionaries(
        st.one_of(
            st.binary(max_size=8),
            st.sampled_from([b"model", b"protocol", b"layers", b"version", b"fingerprint"]),
        ),
        st.one_of(st.none(), st.binary(max_size=300)),
    ),
)
def test_nothing_that_a_stranger_writes_is_long_or_unprintable(
    instance: str, port: int | None, addresses: list[str], values: dict[bytes, bytes | None]
) -> None:
    read = read_answer(instance, port, addresses, values)
    if read is None:
        return
    advert = read.advert
    for text in (advert.name, advert.model, advert.version, advert.fingerprint):
        assert len(text) <= TEXT_BYTES
        assert text.isprintable()
    assert 0 <= advert.layers <= limits.LAYERS
    assert 0 <= advert.protocol < 65_536
    decide([read], HERE, [LLAMA], open_at(read))


# ---- what is said


def test_in_vain_says_what_was_asked_left_out_tried_and_refused_and_what_to_check() -> None:
    search = Search(
        10.0, HERE, ("192.168.1.30", "127.0.0.1"), ((broker("old", protocol=99), "speaks protocol 99"),)
    )
    text = nothing_found(search, "potluck-stage 192.168.1.10")
    for words in (
        "No broker found in 10 s.",
        "eth0 (192.168.1.20), wlan0 (10.0.0.20)",
        "docker0 (for containers)",
        "192.168.1.30, 127.0.0.1",
        "old, llama, 192.168.1.10: speaks protocol 99",
        "potluck-broker run",
        "same network",
        "UDP port 5353",
        "client isolation",
        "potluck-stage 192.168.1.10",
    ):
        assert words in text


def test_in_vain_without_multicast_says_that_nobody_was_asked() -> None:
    text = nothing_found(Search(10.0, HERE, (), (), "multicast does not work here: x"), "")
    assert "not asked" in text
    assert "multicast does not work here: x" in text
