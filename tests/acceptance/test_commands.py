"""`potluck demo`, `infer`, `ps`, `verify` and `bench` as a person runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from acceptance.cluster_world import World, command, command_line, environment, of_session
from tiny_models import write_tiny

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny.gguf", layers=6)


# ---- demo


def test_demo_says_what_it_took_and_what_each_stage_did() -> None:
    ended = command("potluck", "demo", "--max-tokens", "8")
    assert ended.code == 0, ended.err
    chain = r"Chain +[a-z-]+: layers 0-\d+  ->  [a-z-]+: layers \d+-\d+  ->  [a-z-]+: layers \d+-29\n"
    assert re.search(chain, ended.out)
    first = re.search(r"First token after ([\d.]+) s \((\d+) prompt tokens\)", ended.out)
    assert first is not None
    assert float(first[1]) > 0
    assert re.search(r"then [\d.]+ ms per token \(8 tokens\)", ended.out)
    head, *rows = ended.out[ended.out.index("stage ") :].splitlines()[:4]
    assert head.split() == ["stage", "layers", "batches", "ms", "busy", "sent"]
    assert {row.split()[0] for row in rows} == {"laptop", "desktop", "mini-pc"}
    for row in rows:
        assert re.search(r" \d+-\d+ +\d+ +\d+\.\d +\d+ % +\d[\d.]* k?B$", row.rstrip()), row
    assert [row.split()[1] for row in rows].count("*") == 1, "one stage is the slowest"
    ranges = re.findall(r" (\d+)-(\d+) ", "\n".join(rows))
    assert [int(first) for first, _ in ranges[1:]] == [int(last) + 1 for _, last in ranges[:-1]]


def test_demo_of_another_model_and_prompt(tiny: Path) -> None:
    ended = command("potluck", "demo", "--model", tiny, "--prompt", "hello world", "--max-tokens", "4")
    assert ended.code == 0, ended.err
    assert "> hello world" in ended.out
    assert "tiny" in ended.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_all", [True, False], ids=["from the terminal", "to it alone"])
def test_demo_that_is_stopped_leaves_no_process(tiny: Path, number: signal.Signals, to_all: bool) -> None:
    line = command_line("potluck", "demo", "--model", tiny, "--max-tokens", "4")
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), start_new_session=True
    )
    with process:
        assert process.stdout is not None
        while b"Model" not in process.stdout.readline():
            pass
        while not any("stage.cli" in other for other in of_session(process.pid)):
            assert process.poll() is None
        if to_all:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        try:
            _, err = process.communicate(timeout=30)
        finally:
            left = of_session(process.pid)
            if left:
                os.killpg(process.pid, signal.SIGKILL)
    assert not left
    assert process.returncode == 128 + number
    assert b"Traceback" not in err


# ---- infer and ps


def test_infer_with_times_tells_every_token_s_time(exact: World) -> None:
    ended = command(
        "potluck", "infer", "-b", exact.address, "-p", "Count to five.", "-n", "6", "--temperature", "0", "--times"
    )  # fmt: skip
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert re.match(r"Token 1: \d+ ms \(pipeline fill\)  '", lines[0])
    for number, line in enumerate(lines[1:6], start=2):
        assert re.match(rf"Token {number}: \d+ ms  ", line)
        assert "pipeline fill" not in line
    pieces = [re.sub(r"^Token \d+: \d+ ms( \(pipeline fill\))?  ", "", line) for line in lines[:6]]
    text = "".join(piece[1:-1] for piece in pieces)
    assert text.replace("\\n", "\n") in ended.out
    assert re.search(
        r"\d+ prompt tokens, 6 tokens: first after [\d.]+ s, then [\d.]+ ms per token", ended.err
    )


def test_infer_as_json_is_one_object_and_nothing_else(exact: World) -> None:
    asked = ("infer", "-b", exact.address, "--temperature", "0", "-n", "6")
    ended = command("potluck", *asked, "--json", stdin="Count to five.")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["tokens"] == len(found["token_ms"]) == 6
    assert found["finish_reason"] == "length"
    assert found["prompt_tokens"] > 4
    assert found["ttft_s"] > 0
    assert found["ms_per_token"] > 0
    plain = command("potluck", *asked, "--prompt", "Count to five.")
    assert plain.out == found["text"] + "\n"


def test_infer_with_a_seed_says_the_same_again(exact: World) -> None:
    asked = (
        "infer",
        "-b",
        exact.address,
        "-p",
        "Once upon a time",
        "--raw",
        "-n",
        "8",
        "--seed",
        "7",
        "--json",
    )
    texts = {json.loads(command("potluck", *asked).out)["text"] for _ in range(2)}
    assert len(texts) == 1


def test_infer_stops_before_a_stop_string(exact: World) -> None:
    asked = ("infer", "-b", exact.address, "-p", "1, 2, 3, 4,", "--raw", "--temperature", "0", "-n", "24")
    ended = command("potluck", *asked, "--stop", "7,", "--json")
    found = json.loads(ended.out)
    assert found["text"] == " 5, 6, "[: len(found["text"])]
    assert found["finish_reason"] == "stop"


def test_ps_lists_the_stages_and_their_layers(exact: World) -> None:
    ended = command("potluck", "ps", "-b", exact.address)
    assert ended.code == 0, ended.err
    assert "serving; 0 running, 0 waiting, 16 slots of 512 tokens." in ended.out
    for index in range(3):
        assert re.search(rf"^stage-{index + 1} +ready +0\.{index} +\d+-\d+ ", ended.out, re.MULTILINE)
        assert re.search(
            rf"^stage-{index + 1} +1 of \d+ +[\d.]+ (.B )?of [\d.]+ GB ", ended.out, re.MULTILINE
        )
    memory = command("potluck", "ps", "-b", exact.address, "--memory").out
    assert re.search(r"^all 3 devices( +[\d.]+ .?B){3} +[\d.]+ (.B )?of [\d.]+ GB$", memory, re.MULTILINE)
    found = json.loads(command("potluck", "ps", "-b", exact.address, "--json").out)
    assert [stage["device"] for stage in found["stages"]] == ["stage-1", "stage-2", "stage-3"]
    assert found["stages"][0]["end"] == found["stages"][1]["first"]


# ---- verify and bench


def test_verify_as_json_says_whether_stages_compute_the_same(tiny: Path) -> None:
    ended = command("potluck", "verify", tiny, "--stages", "3", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["stages"], found["max_logit_difference"], found["tokens_equal"]) == (3, 0.0, True)
    assert found["passed"] is True
    text = command("potluck", "verify", tiny, "--cuts", "1,5")
    assert "[0, 1), [1, 5), [5, 6)" in text.out
    assert "PASSED" in text.out


def test_bench_throughput_as_json_has_a_row_for_every_number_of_sequences(tiny: Path) -> None:
    ended = command(
        "potluck", "bench", "throughput", "--model", tiny, "--parallel", "1,2", "--generate", "8", "--json"
    )
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert (found["bench"], found["model"], found["cores"]) == ("throughput", "tiny.gguf", [0, 1])
    assert found["layers"] == {"stage-1": [0, 2], "stage-2": [3, 5]}
    assert list(found["by_parallel"]) == ["1", "2"]
    for row in found["by_parallel"].values():
        for key in ("decode_tokens_per_s", "prefill_tokens_per_s", "ttft_s", "token_ms", "compute_ms"):
            assert row[key] > 0, key
        assert set(row["busy"]) == {"stage-1", "stage-2"}
        assert all(0 <= share <= 1 for share in row["busy"].values())


def test_bench_throughput_as_text_is_a_table(tiny: Path) -> None:
    ended = command("potluck", "bench", "throughput", "-m", tiny, "--parallel", "1", "--generate", "4")
    assert ended.code == 0, ended.err
    assert "decode t/s" in ended.out
    assert "stage-2 busy" in ended.out
