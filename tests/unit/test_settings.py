"""The settings file: what it may say, and what is said when it says something else."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from potluck.runtime import address
from potluck.runtime.address import address_towards, seen_from, split_address
from potluck.runtime.command import Command
from potluck.runtime.settings import (
    Settings,
    check_kept,
    config_option,
    defaults_for,
    load_settings,
    parse_settings,
)
from potluck.wire.errors import SettingsError


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"nod": {}}, ("nod", "Did you mean node?")),
        ({"node": {"listen_prot": 1}}, ("node.listen_prot", "Did you mean node.listen_port?")),
        ({"zzz": 1}, ("zzz", "configs/potluck.yaml")),
        ({"node": {"listen_port": "many"}}, ("int", "node.listen_port")),
        ({"node": {"listen_port": 70_000}}, ("65535", "node.listen_port")),
        ({"node": 3}, ("node must be keys and values",)),
        ([1, 2], ("the file must be keys and values",)),
        ({"transport": {"activation": "f8"}}, ("f8", "transport.activation")),
        ({"health": {"heartbeat_seconds": 0}}, ("health.heartbeat_seconds",)),
    ],
)
def test_wrong_setting_is_named_with_what_is_right(raw: object, words: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_settings(raw, "x.yaml")
    for word in ("x.yaml", *words):
        assert word in str(caught.value)


def test_an_empty_file_and_an_empty_section_leave_everything_at_its_default() -> None:
    assert parse_settings(None, "x.yaml") == Settings()
    assert parse_settings({"node": None}, "x.yaml") == Settings()


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\t- x", "!!python/object:os.system {}"])
def test_yaml_that_is_none_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"not valid YAML at line 1"):
        load_settings(path)


def test_a_huge_file_is_no_settings_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"#" * (2 << 20))
    with pytest.raises(SettingsError, match="larger than"):
        load_settings(path)


def test_security_that_does_not_exist_yet_is_not_promised() -> None:
    settings = parse_settings({"security": {"tls_enabled": True}}, "x.yaml")
    with pytest.raises(SettingsError, match="no TLS"):
        check_kept(settings)


def test_devices_on_standby_are_the_brokers_reserve() -> None:
    assert defaults_for(parse_settings({"health": {"standby": ["a"]}}, "x.yaml")) == {"reserve": ["a"]}


def test_only_what_is_set_becomes_a_default() -> None:
    raw = {"node": {"listen_port": 7000}, "compute": {"exact": True}}
    assert defaults_for(parse_settings(raw, "x.yaml")) == {"port": 7000, "exact": True}
    raw = {
        "discovery": {"enabled": False, "interval_seconds": 5, "peers": ["a"]},
        "node": {"network_interface": "eth0"},
    }
    assert defaults_for(parse_settings(raw, "x.yaml")) == {
        "network_interface": "eth0",
        "discovery": False,
        "discovery_interval": 5.0,
        "peers": ["a"],
    }


def test_what_a_device_may_give_becomes_the_stage_s_defaults() -> None:
    raw = {"resources": {"max_memory_gb": 4, "vram_pool_size": 2, "allow_cpu_fallback": False, "mlock": True}}
    assert defaults_for(parse_settings(raw, "x.yaml")) == {
        "max_memory_gb": 4,
        "vram_pool_gb": 2,
        "cpu_fallback": False,
        "mlock": True,
    }


@click.command("tool", cls=Command, context_settings={"auto_envvar_prefix": "POTLUCK"})
@config_option
@click.option("--port", default=1, type=int)
def tool(config: Path | None, port: int) -> None:
    click.echo(f"port {port}")


def test_a_flag_wins_over_the_environment_and_that_over_the_file_and_that_over_the_default(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("node: {listen_port: 2}")
    run = CliRunner().invoke
    assert run(tool, []).output == "port 1\n"
    assert run(tool, ["--config", str(path)]).output == "port 2\n"
    assert run(tool, ["--config", str(path)], env={"POTLUCK_PORT": "3"}).output == "port 3\n"
    assert run(tool, ["--config", str(path), "--port", "4"], env={"POTLUCK_PORT": "3"}).output == "port 4\n"


def test_an_error_inside_an_option_is_a_line_and_an_exit_code(tmp_path: Path) -> None:
    result = CliRunner().invoke(tool, ["--config", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert result.output.startswith("tool: Can't read")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.2", ("10.0.0.2", 7946)),
        ("host:80", ("host", 80)),
        ("tcp://host:80", ("host", 80)),
        ("[::1]:80", ("::1", 80)),
        ("[::1]", ("::1", 7946)),
        ("fe80::1", ("fe80::1", 7946)),
    ],
)
def test_addresses_are_read_as_people_write_them(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text, 7946) == expected


@pytest.mark.parametrize("text", ["", ":80", "host:", "host:x", "host:0", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="is not an address"):
        split_address(text, 7946)


def test_an_endpoint_on_any_address_is_seen_on_the_host_that_was_dialled() -> None:
    assert seen_from("tcp://10.0.0.2:7946", "tcp://0.0.0.0:7947") == "tcp://10.0.0.2:7947"
    assert seen_from("tcp://10.0.0.2:7946", "tcp://10.0.0.9:7947") == "tcp://10.0.0.9:7947"


def test_the_address_towards_this_machine_is_the_loopback() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_a_machine_without_a_network_is_dialled_on_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_way(host: str) -> str:
        raise OSError(f"no way to {host}")

    monkeypatch.setattr(address, "address_towards", no_way)
    assert address.lan_address() == "127.0.0.1"
