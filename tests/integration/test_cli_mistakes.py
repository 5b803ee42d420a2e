"""Ports that are taken, settings and flags that are wrong, brokers that aren't there: one clear error, at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.cluster_world import World, command, free_port, taken_port
from tiny_models import write_tiny

AT_ONCE_S = 15.0
"""What "a few seconds" may become on a machine that is busy."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


# ---- ports


@pytest.mark.parametrize(
    ("flag", "hint"), [("--port", "another port"), ("--results-port", "another port"), ("--http", "--http")]
)
def test_a_port_that_is_taken_is_named(flag: str, hint: str, tiny: Path) -> None:
    ports = {"--port": "0", "--results-port": "0", "--http": "127.0.0.1:0"}
    with taken_port() as port:
        ports[flag] = f"127.0.0.1:{port}" if flag == "--http" else str(port)
        options = [part for pair in ports.items() for part in pair]
        ended = command("potluck-broker", "-m", tiny, "--listen-address", "127.0.0.1", *options)
    assert ended.code == 1
    assert str(port) in ended.lines[-1]
    assert hint in ended.lines[-1]
    assert ended.lines[-1].startswith("potluck-broker: ")


def test_an_address_that_is_not_of_this_machine_is_named(tiny: Path) -> None:
    ended = command(
        "potluck-broker", "-m", tiny, "--listen-address", "203.0.113.7", "--http", "off", "--port", "0"
    )
    assert ended.code == 2
    assert "203.0.113.7" in ended.lines[-1]


# ---- settings and flags


@pytest.mark.parametrize("name", ["potluck-broker", "potluck-stage"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("compute: {exakt: true}", ["compute.exakt", "compute.exact"]),
        ("nodes: {name: a}", ["nodes", "Did you mean node?"]),
        ("health: {misses: many}", ["health.misses", "int"]),
        ("health: {misses: 0}", ["misses"]),
        ("node: [", ["YAML", "line 1"]),
        ("just words", ["keys and values"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(
    name: str, text: str, words: list[str], tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "potluck.yaml"
    file.write_text(text)
    ended = command(name, "--config", file, "--model", tiny)
    assert ended.code == 2
    assert "potluck.yaml" in ended.err
    for word in words:
        assert word in ended.err
    assert len(ended.lines) <= 2


def test_a_settings_file_that_is_not_there_is_named(tiny: Path, tmp_path: Path) -> None:
    ended = command("potluck-broker", "--config", tmp_path / "none.yaml", "--model", tiny)
    assert ended.code == 2
    assert "none.yaml" in ended.err


@pytest.mark.parametrize(
    "line",
    [
        ["potluck", "infer", "--no-such-flag"],
        ["potluck", "infer", "-p", "x", "--max-tokens", "0"],
        ["potluck", "infer", "-p", "x", "--temperature", "-1"],
        ["potluck", "infer", "-p", "x", "--temperature", "1000"],
        ["potluck", "infer", "-p", "x", "--seed", "-5"],
        ["potluck", "infer", "-p", "x", "--broker", "host:notaport"],
        ["potluck", "no-such-command"],
        ["potluck", "bench", "throughput", "--cores", "a"],
        ["potluck", "bench", "throughput", "--parallel", "0"],
        ["potluck-broker"],
        ["potluck-broker", "-m", "x.gguf", "--port", "70000"],
        ["potluck-stage", "--threads", "0"],
        ["potluck-stage", "host:notaport"],
        ["potluck-stage", ":7946"],
        ["potluck-stage", "--no-discovery"],
        ["potluck-stage", "--network-interface", "no-such"],
        ["potluck-stage", "--peer", "host:notaport"],
    ],
    ids=" ".join,
)
def test_a_wrong_flag_ends_with_status_2_and_a_line(line: list[str], tiny: Path) -> None:
    more = ["-m", str(tiny)] if line[:2] == ["potluck", "bench"] else []
    ended = command(*line, *more)
    assert ended.code == 2
    assert ended.err.strip()
    assert len(ended.lines) <= 4
    assert ended.seconds < AT_ONCE_S


# ---- no broker, no stage


@pytest.mark.parametrize("line", [["infer", "--prompt", "Hello"], ["ps"]], ids=" ".join)
def test_without_a_broker_a_command_says_so_and_ends_with_status_3(line: list[str]) -> None:
    address = f"127.0.0.1:{free_port()}"
    ended = command("potluck", *line, "--broker", address)
    assert ended.code == 3
    assert "No broker answers" in ended.err
    assert address in ended.err
    assert len(ended.lines) == 1
    assert ended.seconds < AT_ONCE_S


def test_without_a_prompt_there_is_nothing_to_infer() -> None:
    for more in ([], ["--prompt", "-"]):
        ended = command("potluck", "infer", "--broker", f"127.0.0.1:{free_port()}", *more, stdin="")
        assert ended.code == 2
        assert ended.lines == ['potluck: There is no prompt. Give one: potluck infer --prompt "Hello".']


@pytest.fixture(scope="module")
def lonely(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A broker without any stage."""
    made = World(tiny, tmp_path_factory.mktemp("lonely"))
    with made.runner:
        try:
            made.run(made.start_broker("--stages", "2"))
            yield made
        finally:
            made.run(made.close())
    made.check_ended()


def test_without_a_stage_infer_says_what_is_missing(lonely: World) -> None:
    ended = command("potluck", "infer", "--prompt", "Hello", "--broker", lonely.address)
    assert ended.code == 3
    assert "0 of at least 2 stages have joined" in ended.err
    assert ended.seconds < AT_ONCE_S


def test_without_a_stage_ps_says_what_is_missing(lonely: World) -> None:
    ended = command("potluck", "ps", "--broker", lonely.address)
    assert ended.code == 0
    assert "tiny" in ended.out
    assert "not serving: 0 of at least 2 stages have joined." in ended.out


def test_without_a_stage_rest_says_503_and_when_to_come_back(lonely: World) -> None:
    async def scenario() -> None:
        async with lonely.rest() as client:
            for method, path, body in (
                ("POST", "/v1/completions", {"prompt": "Hello"}),
                ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
                ("POST", "/v1/completions", {"prompt": "Hello", "stream": True}),
                ("POST", "/completion", {"prompt": "Hello"}),
                ("GET", "/health", None),
            ):
                answer = await client.request(method, path, json=body)
                assert answer.status_code == 503, path
                assert int(answer.headers["retry-after"]) > 0
                assert "0 of at least 2 stages" in answer.json()["error"]["message"]
                assert answer.json()["error"]["code"] == "unavailable"
            assert (await client.get("/v1/models")).status_code == 200

    lonely.run(scenario())


def test_a_stage_with_another_model_file_is_refused(lonely: World, tiny: Path, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "tiny.gguf", seed=1)
    ended = command("potluck-stage", lonely.address, "--model", other, "--name", "laptop")
    assert ended.code == 1
    last = ended.lines[-1]
    assert last.startswith("potluck-stage: ")
    assert "laptop has no copy of tiny (fingerprint " in last
    assert "--model" in last


def test_a_stage_without_any_model_file_is_refused(lonely: World) -> None:
    ended = command("potluck-stage", lonely.address)
    assert ended.code == 1
    assert "has no copy of tiny" in ended.lines[-1]
