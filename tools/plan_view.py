"""A plan as people and programs read it: a table per chain, what to expect, and the reasons. Pure.

It is the same for a plan in force and for one on paper; the caller says which. Everything fits 80 columns, a device's
name is folded and never cut, and nothing is said by colour alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from potluck.planner.plan import Demand
from potluck.planner.words import counted, delay, gb_cell, ms_cell, per_s
from potluck.tools.tables import layers_text
from potluck.wire.forecast import ChainForecast, Forecast, StageForecast
from potluck.wire.messages import PlanView


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a stage. Figures of another source (measured ones, say) are columns of their own."""

    title: str
    cell: Callable[[StageForecast], str]


DEVICE = Column("device", lambda stage: stage.device)
LAYERS = Column("layers", lambda stage: layers_text(stage.first, stage.end))
ON_GPU = Column("on GPU", lambda stage: str(stage.gpu_layers))
COMPUTE = Column("compute ms", lambda stage: ms_cell(stage.decode_s))
SEND = Column("send ms", lambda stage: ms_cell(stage.send_s))
BUSY = Column("busy", lambda stage: f"{100 * stage.busy:.0f} %")


def _memory_text(stage: StageForecast) -> str:
    used = gb_cell(stage.weights_bytes + stage.kv_bytes + stage.compute_bytes)
    return f"{used} of {gb_cell(stage.memory_bytes)}" if stage.memory_bytes else used


MEMORY = Column("memory GB", _memory_text)


def columns(chain: ChainForecast) -> tuple[Column, ...]:
    """Those of a forecast; the GPU's only where one computes."""
    gpu = (ON_GPU,) if any(stage.gpu_layers for stage in chain.stages) else ()
    return (DEVICE, LAYERS, *gpu, COMPUTE, SEND, BUSY, MEMORY)


def chain_table(chain: ChainForecast, more: Sequence[Column] = ()) -> Table:
    """The stages of a chain in order. `more` columns come last."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    shown = (*columns(chain), *more)
    for column in shown:
        if column is DEVICE:
            table.add_column(column.title, overflow="fold")
        else:
            table.add_column(column.title, justify="right", no_wrap=True)
    for stage in chain.stages:
        table.add_row(*(Text(column.cell(stage)) for column in shown))
    return table


def render(
    view: PlanView, demand: Demand, note: str, more: Sequence[Column] = ()
) -> Iterator[RenderableType]:
    """The whole plan. `note` says where its figures come from."""
    room = f"{counted(demand.slots, 'slot')} of {demand.context_tokens} tokens per chain"
    yield Sentences([f"{view.model}: {counted(view.users, 'user')}, {room}.", note])
    if view.forecast is None:
        yield Sentences([view.detail or "No speed is known, so nothing can be predicted."])
    else:
        for number, chain in enumerate(view.forecast.chains, 1):
            yield Text("")
            if len(view.forecast.chains) > 1 or chain.users > 1:
                yield Text(_chain_text(number, view.forecast, chain))
            yield chain_table(chain, more)
        yield Text("")
        yield Sentences(summary(view.forecast))
    if view.reasons:
        yield Text("")
        yield Text("Why", style="bold")
        yield bullets(view.reasons)
    if view.left_out:
        yield Text("")
        yield Sentences([f"Not used: {', '.join(view.left_out)}."])


@dataclass(frozen=True, slots=True)
class Sentences:
    """Sentences, each on lines of its own that are as wide as the console, further ones set in below the first."""

    texts: Sequence[str]
    mark: str = ""
    """Before each of them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Wraps at spaces only; what has none and is too long is folded by the console."""
        for text in self.texts:
            yield Text(
                textwrap.fill(
                    self.mark + text,
                    options.max_width,
                    subsequent_indent=" " * len(self.mark),
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )


def bullets(sentences: Sequence[str]) -> Sentences:
    """A list of reasons."""
    return Sentences(sentences, "- ")


def summary(forecast: Forecast) -> list[str]:
    """What somebody who asks will see, and what holds the plan back."""
    each = " for each user" if forecast.users > 1 else ""
    total = "in all" if forecast.users > 1 else "that is"
    first = (
        f"First token after {delay(forecast.ttft_s)} (prompt of {forecast.prompt_tokens} tokens), then "
        f"{_token_text(forecast)} ms per token{each}; {total} {per_s(forecast.tokens_per_s)} tokens/s."
    )
    lines = [first]
    for number, chain in enumerate(forecast.chains, 1):
        which = f"Chain {number}: bubble" if len(forecast.chains) > 1 else "Bubble"
        lines.append(f"{which} {100 * chain.bubble:.0f} %, limited by {chain.limit}.")
    return lines


def _token_text(forecast: Forecast) -> str:
    """Of chains that differ, the fastest and the slowest."""
    paces = {ms_cell(chain.token_s): chain.token_s for chain in forecast.chains}
    ends = sorted(paces, key=lambda text: paces[text])
    return ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def to_json(view: PlanView, demand: Demand, source: str) -> str:
    """One JSON object: what was asked for, and the plan with its forecast in seconds and bytes."""
    return msgspec.json.encode({"source": source, **demand_parts(demand), "plan": view}).decode()


def demand_parts(demand: Demand) -> dict[str, Any]:
    """What a plan was made for."""
    return {
        "users": demand.users,
        "slots": demand.slots,
        "context_tokens": demand.context_tokens,
        "prompt_tokens": demand.prompt_tokens,
    }


def _chain_text(number: int, forecast: Forecast, chain: ChainForecast) -> str:
    which = f"Chain {number} of {len(forecast.chains)}, " if len(forecast.chains) > 1 else ""
    return f"{which}{counted(chain.users, 'user')}, {counted(chain.rows, 'token')} in a micro-batch:"
