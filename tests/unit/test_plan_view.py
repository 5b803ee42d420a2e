"""How a plan is printed: whole names, 80 columns, a table per chain, and columns that others may add."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from potluck.planner.plan import Demand
from potluck.planner.words import delay, ms_cell, per_s
from potluck.tools.plan_view import Column, render, to_json
from potluck.wire.forecast import ChainForecast, Forecast, StageForecast
from potluck.wire.messages import PlanView


def stage(device: str, first: int, end: int, gpu_layers: int = 0, decode_s: float = 0.0421) -> StageForecast:
    return StageForecast(
        stage=f"{device}/1",
        device=device,
        first=first,
        end=end,
        gpu_layers=gpu_layers,
        decode_s=decode_s,
        prefill_s=0.5,
        send_s=0.0012,
        busy=0.4,
        weights_bytes=3_000_000_000,
        kv_bytes=500_000_000,
        compute_bytes=50_000_000,
        memory_bytes=8_000_000_000,
    )


def chain(*stages: StageForecast, users: int = 1, rows: int = 1, token_s: float = 0.1) -> ChainForecast:
    return ChainForecast(users, rows, token_s, users / token_s, 2.5, 0.6, stages[0].device, stages)


def view(*chains: ChainForecast, **parts: object) -> PlanView:
    users = sum(one.users for one in chains)
    total = sum(one.tokens_per_s for one in chains)
    forecast = Forecast(users, chains[0].token_s, total, 2.5, 256, chains)
    plain = PlanView(epoch=1, model="tiny", users=users, reasons=("Because.",), forecast=forecast)
    return PlanView(**{**{name: getattr(plain, name) for name in plain.__struct_fields__}, **parts})


def printed(shown: PlanView, *more: Column, width: int = 80) -> str:
    out = StringIO()
    console = Console(file=out, width=width, highlight=False)
    for part in render(shown, Demand(users=shown.users), "Measured.", more):
        console.print(part)
    return out.getvalue()


def test_a_chain_is_a_table_with_what_to_expect_and_the_reasons_below() -> None:
    assert printed(view(chain(stage("laptop", 0, 20), stage("desktop", 20, 32)), left_out=("phone",))) == (
        "tiny: 1 user, 8 slots of 2048 tokens per chain.\n"
        "Measured.\n"
        "\n"
        "device   layers  compute ms  send ms  busy   memory GB\n"
        "laptop     0-19        42.1      1.2  40 %  3.5 of 8.0\n"
        "desktop   20-31        42.1      1.2  40 %  3.5 of 8.0\n"
        "\n"
        "First token after 2.50 s (prompt of 256 tokens), then 100 ms per token; that is\n"
        "10.0 tokens/s.\n"
        "Bubble 60 %, limited by laptop.\n"
        "\n"
        "Why\n"
        "- Because.\n"
        "\n"
        "Not used: phone.\n"
    )


def test_layers_on_a_gpu_have_a_column_only_where_there_are_some() -> None:
    assert "on GPU" not in printed(view(chain(stage("a", 0, 4))))
    assert "on GPU" in printed(view(chain(stage("a", 0, 4), stage("b", 4, 8, gpu_layers=3))))


def test_several_chains_are_numbered_each_with_its_users() -> None:
    text = printed(
        view(chain(stage("a", 0, 4), users=5, rows=5), chain(stage("b", 0, 2), stage("c", 2, 4), users=1))
    )
    assert "Chain 1 of 2, 5 users, 5 tokens in a micro-batch:" in text
    assert "Chain 2 of 2, 1 user, 1 token in a micro-batch:" in text
    assert "Chain 2: bubble 60 %, limited by b." in text
    assert "for each user; in all 60.0 tokens/s" in " ".join(text.split())


@pytest.mark.parametrize(
    "name", ["a" * 121, "the-old-laptop-from-the-attic-that-nobody-uses-any-more", "günters [pc]"]
)
def test_a_devices_name_is_never_cut_nor_read_as_markup(name: str) -> None:
    lines = printed(view(chain(stage(name, 0, 4), stage("b", 4, 8, gpu_layers=4)))).splitlines()
    assert all(len(line) <= 80 for line in lines)
    header, *rows = lines[3 : lines.index("", 3)]
    column = "".join(row[: header.index("layers")].strip() for row in rows)
    assert column == f"{name}b"


def test_columns_of_another_source_stand_beside_the_forecast() -> None:
    measured = Column("measured ms", lambda one: {"a": "44.0", "b": "51.0"}[one.device])
    lines = printed(view(chain(stage("a", 0, 4), stage("b", 4, 8))), measured).splitlines()
    assert lines[3].endswith("measured ms")
    assert [line.split()[-1] for line in lines[4:6]] == ["44.0", "51.0"]


def test_a_plan_without_a_forecast_says_why() -> None:
    shown = view(chain(stage("a", 0, 4)), forecast=None, detail="Waiting for two stages.")
    assert "Waiting for two stages." in printed(shown)
    assert "No speed is known" in printed(PlanView(epoch=1, model="tiny"))


def test_a_stage_without_room_is_said_to_take_for_ever() -> None:
    text = printed(view(chain(stage("a", 0, 4, decode_s=1e9), token_s=1e9)))
    assert text.count("never") == 2


def test_figures_have_the_digits_that_count() -> None:
    assert [ms_cell(s) for s in (0.0, 0.00001, 0.0421, 0.09999, 1.636)] == [
        "0.0",
        "<0.1",
        "42.1",
        "100",
        "1636",
    ]
    assert [delay(s) for s in (0.414, 12.3)] == ["0.41 s", "12 s"]
    assert [per_s(r) for r in (0.614, 12.71, 1234.5)] == ["0.61", "12.7", "1234"]


def test_json_has_the_demand_and_the_whole_plan() -> None:
    shown = view(chain(stage("a", 0, 4)))
    found = json.loads(to_json(shown, replace(Demand(), slots=3), "measured"))
    assert (found["source"], found["slots"], found["plan"]["model"]) == ("measured", 3, "tiny")
    assert found["plan"]["forecast"]["chains"][0]["stages"][0]["device"] == "a"
