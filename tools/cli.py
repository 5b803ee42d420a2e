"""`potluck`: the command line. Each command's work is in a file of its own; this one reads options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, cast

import click
import msgspec

from potluck.runtime.client import Client
from potluck.runtime.command import Group, run
from potluck.tools.broker_address import broker_address
from potluck.tools.console import make_console
from potluck.wire import limits
from potluck.wire.errors import PlanError, UsageError
from potluck.wire.sampling import Sampling


@click.group("potluck", cls=Group, context_settings={"auto_envvar_prefix": "POTLUCK", "show_default": True})
@click.version_option(package_name="potluck")
def main() -> None:
    """Pool the computers you already own and run a language model that none of them could run alone."""


broker_option = click.option(
    "--broker",
    "-b",
    envvar="POTLUCK_BROKER",
    help="Address of the broker.  [default: this machine's, or the one found on the network]",
)


@main.command()
@click.option("--model", "-m", type=click.Path(path_type=Path), help="Another GGUF file than the demo's.")
@click.option("--prompt", "-p", help="Another prompt.")
@click.option("--max-tokens", default=96, type=click.IntRange(1))
def demo(model: Path | None, prompt: str | None, max_tokens: int) -> None:
    """Start a broker and three stages on this machine and answer a prompt."""
    from potluck.tools.demo import PROMPT, demo_model
    from potluck.tools.demo import demo as run_demo

    run(run_demo(make_console(), model or demo_model(), prompt or PROMPT, max_tokens))


@main.command()
@broker_option
@click.option("--prompt", "-p", help="The prompt; '-' or nothing reads it from standard input.")
@click.option("--max-tokens", "-n", default=128, type=click.IntRange(1), help="Tokens of the answer at most.")
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the chat template.")
@click.option("--system", help="A system message before the prompt.")
@click.option(
    "--temperature", default=0.8, type=click.FloatRange(0.0, 100.0), help="0 takes the likeliest token."
)
@click.option("--top-k", default=40, type=click.IntRange(0, 1_000_000))
@click.option("--top-p", default=0.95, type=click.FloatRange(0.0, 1.0))
@click.option("--min-p", default=0.05, type=click.FloatRange(0.0, 1.0))
@click.option(
    "--seed", type=click.IntRange(0, (1 << 32) - 1), help="The same seed gives the same text again."
)
@click.option("--stop", multiple=True, help="End the answer before this text. May be repeated.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, limits.TIMEOUT_S, min_open=True),
    help="Fail if the answer is not finished after this many seconds.  [default: as the broker says]",
)
@click.option(
    "--times/--no-times", default=None, help="A line per token with its time.  [default: on a terminal]"
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end.")
def infer(
    broker: str | None,
    prompt: str | None,
    max_tokens: int,
    raw: bool,
    system: str | None,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    timeout: float | None,
    times: bool | None,
    as_json: bool,
) -> None:
    """Answer one prompt, with the time of each token and the average."""
    from potluck.tools.infer import infer as run_infer
    from potluck.tools.infer import summary

    text = _prompt(prompt)
    console = make_console()
    show_times = sys.stdout.isatty() if times is None else times
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    async def work() -> None:
        async with Client(await broker_address(broker)) as client:
            await client.state()  # says at once when nobody answers
            answer = await run_infer(
                client, text, raw=raw, system=system, max_tokens=max_tokens, sampling=sampling, seed=seed, stop=stop,
                timeout_s=timeout, console=None if as_json else console, times=show_times,
            )  # fmt: skip
        if as_json:
            click.echo(answer.to_json())
            return
        if show_times:
            console.out(f"\n{answer.text}\n", highlight=False)
        else:
            console.out("")
        make_console(stderr=True).print(summary(answer), markup=False)

    run(work())


@main.command()
@broker_option
@click.argument("device")
@click.option("--undo", is_flag=True, help="Let the device have work again.")
@click.option("--wait/--no-wait", default=True, help="Wait until it has no work.")
@click.option("--timeout", default=300.0, type=click.FloatRange(0.1), help="Seconds to wait at most.")
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
def drain(broker: str | None, device: str, undo: bool, wait: bool, timeout: float, as_json: bool) -> None:
    """Move the work of DEVICE to others, so that it can be switched off. Requests that run go on."""
    from potluck.tools.drain import drain as run_drain

    console = make_console()

    async def work() -> None:
        async with Client(await broker_address(broker)) as client:
            if undo:
                now = await client.drain(device, back=True)
            else:
                say = (lambda _: None) if as_json else console.print
                now = await run_drain(client, device, say, wait=wait, timeout_s=timeout)
        if as_json:
            click.echo(msgspec.json.encode(now).decode())
        elif undo:
            console.print(f"{device} may have work again.")
        else:
            console.print(f"{device}: {now.text}")

    run(work())


@main.command()
@broker_option
@click.option("--memory", is_flag=True, help="What layers take of what each device offers.")
@click.option("--json", "as_json", is_flag=True, help="The whole state as JSON.")
def ps(broker: str | None, memory: bool, as_json: bool) -> None:
    """List the stages that have joined, what they hold, and what their machines have."""
    from potluck.tools.device_tables import machine_notes, machine_table, memory_view
    from potluck.tools.plan_view import Sentences
    from potluck.tools.tables import device_notes, device_table, stage_table

    async def work() -> None:
        async with Client(await broker_address(broker)) as client:
            view = await client.state()
        if as_json:
            click.echo(msgspec.json.encode(view).decode())
            return
        console = make_console()
        state = "serving" if view.ready else f"not serving: {view.detail}"
        console.print(
            f"{view.model}, {state}; {view.running} running, {view.queued} waiting, "
            f"{view.slots} slots of {view.context_tokens} tokens.",
            markup=False,
        )
        if view.stages and memory:
            console.print(*memory_view(view), sep="\n")
        elif view.stages:
            console.print(device_table(view))
            console.print(Sentences(device_notes(view)))
            console.print()
            console.print(machine_table(view))
            console.print()
            console.print(*machine_notes(view), sep="\n")
            if any(stage.hops.batches for stage in view.stages):
                console.print()
                console.print(stage_table(view))

    run(work())


@main.command()
@broker_option
@click.option(
    "--cluster",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Plan for machines that are only described (YAML); docs/planning.md says how.",
)
@click.option("--model", "-m", type=click.Path(path_type=Path), help="A GGUF file.  [default: as described]")
@click.option(
    "--users", type=click.IntRange(1, limits.USERS), help="People served at the same time.  [default: 1]"
)
@click.option(
    "--slots",
    type=click.IntRange(1, 256),
    help="Sequences that a chain can hold.  [default: 8, or as many as users]",
)
@click.option(
    "--context",
    type=click.IntRange(16, limits.PROMPT_TOKENS),
    help="Tokens of one sequence, answer included.  [default: 2048]",
)
@click.option(
    "--prompt",
    type=click.IntRange(1, limits.PROMPT_TOKENS),
    help="Tokens of the prompt whose first token is predicted.  [default: a quarter of the context, at most 256]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan(
    broker: str | None,
    cluster: Path | None,
    model: Path | None,
    users: int | None,
    slots: int | None,
    context: int | None,
    prompt: int | None,
    as_json: bool,
) -> None:
    """Say which machine holds which layers, how fast that is, and why.

    Without --cluster, of the running broker: the plan in force, and how it does with other --users.
    """
    if cluster is None:
        if model is not None or slots is not None or context is not None:
            raise UsageError(
                "--model, --slots and --context are the running broker's.",
                hint="Leave them out, or describe the machines: --cluster FILE.",
            )
        run(_plan_in_force(broker, users, prompt, as_json))
        return
    from potluck.tools.plan import Unfitting, Wish, plan_described, show

    found = plan_described(cluster, model, Wish(users, slots, context, prompt))
    if as_json:
        click.echo(found.to_json())
    else:
        show(make_console(), found)
    sys.exit(PlanError.exit_code if isinstance(found, Unfitting) else 0)


async def _plan_in_force(broker: str | None, users: int | None, prompt: int | None, as_json: bool) -> None:
    from potluck.tools.plan_live import ask, show, to_json

    async with Client(await broker_address(broker)) as client:
        view, state = await ask(client, users, prompt)
    if as_json:
        click.echo(to_json(view, state))
    else:
        show(make_console(), view, state)


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--stages", "-s", default=3, type=click.IntRange(2, 256), help="Stages to cut the model into.")
@click.option("--cuts", help="Cut at these layers instead, for example 1,2,9.")
@click.option("--activation", default="f32", type=click.Choice(["f32", "f16"]), help="Numbers on the wire.")
@click.option("--exact", is_flag=True, help="Compute as with compute.exact.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def verify(model: Path, stages: int, cuts: str | None, activation: str, exact: bool, as_json: bool) -> None:
    """Run MODEL whole and split, and compare logits and tokens."""
    from potluck.tools.verify import run_verify

    codec = cast(Literal["f32", "f16"], activation)
    report = run_verify(model, stages, cuts=_cuts(cuts), activation=codec, exact=exact)
    click.echo(report.to_json() if as_json else report.to_text())
    sys.exit(0 if report.passed else 1)


@main.group()
def bench() -> None:
    """Measure a cluster of real processes on this machine."""


@bench.command()
@click.option(
    "--model", "-m", type=click.Path(path_type=Path), help="A GGUF file.  [default: the demo's model]"
)
@click.option("--cores", default="0,1", help="One stage of one thread per core, pinned to it.")
@click.option("--parallel", default="1,2,4,8,16", help="Numbers of sequences at the same time.")
@click.option("--prompt-tokens", default=16, type=click.IntRange(1))
@click.option("--generate", default=64, type=click.IntRange(2), help="Tokens of each answer.")
@click.option("--layers", help="Layers of each stage, for example 17,13.  [default: as planned]")
@click.option(
    "--plan", default="even", type=click.Choice(["even", "measured"]), help="How layers are shared out."
)
@click.option("--activation", default="f32", type=click.Choice(["f32", "f16"]))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def throughput(
    model: Path | None,
    cores: str,
    parallel: str,
    prompt_tokens: int,
    generate: int,
    layers: str | None,
    plan: str,
    activation: str,
    as_json: bool,
) -> None:
    """Tokens per second, time to first token and busy shares at several numbers of sequences."""
    from potluck.tools.bench import run_throughput
    from potluck.tools.demo import demo_model

    report = run(
        run_throughput(
            model or demo_model(), _numbers(cores, "--cores"), _numbers(parallel, "--parallel"),
            prompt_tokens=prompt_tokens, generate=generate, activation=activation,
            layers=None if layers is None else _numbers(layers, "--layers"), plan=plan,
        )
    )  # fmt: skip
    click.echo(report.to_json() if as_json else report.to_text())


@bench.command("device")
@click.option(
    "--model", "-m", type=click.Path(path_type=Path), help="A GGUF file.  [default: the demo's model]"
)
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="Compute threads.  [default: physical cores minus one]"
)
@click.option("--slots", default=8, type=click.IntRange(1, 256), help="Sequences at the same time.")
@click.option(
    "--context", default=2048, type=click.IntRange(16, limits.PROMPT_TOKENS), help="Tokens of one sequence."
)
@click.option(
    "--chunk",
    default=64,
    type=click.IntRange(1, limits.BATCH_TOKENS),
    help="Tokens of a prompt per micro-batch.",
)
@click.option("--fresh", is_flag=True, help="Measure anew, whatever is kept.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def bench_device(
    model: Path | None, threads: int | None, slots: int, context: int, chunk: int, fresh: bool, as_json: bool
) -> None:
    """How fast this machine computes layers of a model, and what memory they take."""
    from potluck.stage.capabilities import default_threads
    from potluck.tools.bench_device import measure_device, print_report
    from potluck.tools.demo import demo_model

    report = measure_device(
        make_console(stderr=True), model or demo_model(), threads=threads or default_threads(), slots=slots,
        context_tokens=context, batch_tokens=max(chunk, slots), fresh=fresh,
    )  # fmt: skip
    if as_json:
        click.echo(report.to_json())
    else:
        print_report(make_console(), report)


@bench.command("plan")
@click.option(
    "--model", "-m", type=click.Path(path_type=Path), help="A GGUF file.  [default: the demo's model]"
)
@click.option("--cores", default="0,1", help="One stage of one thread per core, pinned to it.")
@click.option(
    "--share", "shares", default="100,30", help="Per cent of its core for each stage (root, Linux)."
)
@click.option("--users", default=4, type=click.IntRange(1, 256), help="Sequences at the same time.")
@click.option("--prompt-tokens", default=16, type=click.IntRange(1))
@click.option("--generate", default=64, type=click.IntRange(2), help="Tokens of each answer.")
@click.option(
    "--memory-gb", type=click.FloatRange(0, min_open=True), help="What each stage may take, at most."
)
@click.option("--rounds", default=3, type=click.IntRange(1), help="How often each split is tried, in turn.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def bench_plan(
    model: Path | None,
    cores: str,
    shares: str,
    users: int,
    prompt_tokens: int,
    generate: int,
    memory_gb: float | None,
    rounds: int,
    as_json: bool,
) -> None:
    """The planned split against an even one on unequal devices, and the forecast against the clock."""
    from potluck.tools.bench_plan import run_plan
    from potluck.tools.demo import demo_model

    report = run(
        run_plan(
            model or demo_model(), _numbers(cores, "--cores"), [n / 100 for n in _numbers(shares, "--share")], users,
            prompt_tokens=prompt_tokens, generate=generate, rounds=rounds, memory_gb=memory_gb,
        )
    )  # fmt: skip
    click.echo(report.to_json() if as_json else report.to_text())


@bench.command("recovery")
@click.option(
    "--model", "-m", type=click.Path(path_type=Path), help="A GGUF file.  [default: the demo's model]"
)
@click.option("--kills", default=100, type=click.IntRange(1), help="How many faults.")
@click.option("--streams", default=8, type=click.IntRange(1, 256), help="Answers that run all the time.")
@click.option("--seed", default=1, type=click.IntRange(0), help="Draws prompts, moments and stages.")
@click.option("--exact", is_flag=True, help="With compute.exact, so that every answer has to be the same.")
@click.option(
    "--fault",
    default="kill",
    type=click.Choice(["kill", "freeze", "hang", "two"]),
    help="What happens to a stage: it is killed, stopped for a while, computes for ever, or two are killed at once.",
)
@click.option(
    "--standby",
    default="both",
    type=click.Choice(["both", "auto", "off"]),
    help="With slices on standby, without, or each for half of the faults.",
)
@click.option(
    "--rounds-per-cluster",
    default=25,
    type=click.IntRange(1),
    help="Faults until everything is started anew.",
)
@click.option(
    "--logs",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the processes' logs in this folder.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def bench_recovery(
    model: Path | None,
    kills: int,
    streams: int,
    seed: int,
    exact: bool,
    fault: str,
    standby: str,
    rounds_per_cluster: int,
    logs: Path | None,
    as_json: bool,
) -> None:
    """Kill stages in the middle of answers, and count tokens that are lost and seconds until the next one.

    The status is 1 if a token was lost or came twice, or a request failed.
    """
    from potluck.tools.bench_recovery import RecoveryBench, run_recovery
    from potluck.tools.demo import demo_model
    from potluck.tools.recovery_faults import Fault

    bench = RecoveryBench(
        model or demo_model(), kills, streams, seed, exact, Fault(fault), standby, rounds_per_cluster, logs
    )
    report = run(run_recovery(bench, lambda line: click.echo(line, err=True)))
    click.echo(report.to_json() if as_json else report.to_text())
    for line in report.faulty if as_json else ():
        click.echo(line, err=True)
    sys.exit(0 if report.tally.whole else 1)


@main.group("jobs", invoke_without_command=True)
@broker_option
@click.option("--limit", default=20, type=click.IntRange(1, limits.JOBS), help="How many, the newest first.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.pass_context
def jobs_group(context: click.Context, broker: str | None, limit: int, as_json: bool) -> None:
    """Hand in prompts whose answers are kept, and fetch them later. Alone: list the newest jobs."""
    context.obj = broker
    if context.invoked_subcommand is None:
        from potluck.tools.jobs import list_jobs

        run(list_jobs(make_console(), broker, limit, as_json))


@jobs_group.command("submit")
@broker_option
@click.argument("prompt", required=False)
@click.option("--key", help="A name of your own: the same key again is the same job.  [default: drawn]")
@click.option("--max-tokens", "-n", default=128, type=click.IntRange(1), help="Tokens of the answer at most.")
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the chat template.")
@click.option("--system", help="A system message before the prompt.")
@click.option("--temperature", default=0.8, type=click.FloatRange(0.0, 100.0))
@click.option("--seed", type=click.IntRange(0, (1 << 32) - 1))
@click.option("--wait", is_flag=True, help="Wait for the answer and print it.")
@click.option("--json", "as_json", is_flag=True, help="The job as one JSON object.")
@click.pass_obj
def submit_job(
    above: str | None,
    broker: str | None,
    prompt: str | None,
    key: str | None,
    max_tokens: int,
    raw: bool,
    system: str | None,
    temperature: float,
    seed: int | None,
    wait: bool,
    as_json: bool,
) -> None:
    """Hand in PROMPT; '-' or nothing reads it from standard input. Prints the job's key."""
    from potluck.tools.jobs import NewPrompt, submit_job

    wanted = NewPrompt(_prompt(prompt), key, max_tokens, raw, system, Sampling(temperature=temperature), seed)
    run(submit_job(make_console(), broker or above, wanted, wait=wait, as_json=as_json))


@jobs_group.command("show")
@broker_option
@click.argument("key")
@click.option("--wait", is_flag=True, help="Wait until the job has ended.")
@click.option("--json", "as_json", is_flag=True, help="The job as one JSON object.")
@click.pass_obj
def show_job(above: str | None, broker: str | None, key: str, wait: bool, as_json: bool) -> None:
    """Print a job's answer, or how far it is."""
    from potluck.tools.jobs import show_job

    run(show_job(make_console(), broker or above, key, wait=wait, as_json=as_json))


@jobs_group.command("forget")
@broker_option
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="What the job was, as one JSON object.")
@click.pass_obj
def forget_job(above: str | None, broker: str | None, key: str, as_json: bool) -> None:
    """Cancel a job if it has not ended, and forget its answer."""
    from potluck.tools.jobs import forget_job

    run(forget_job(make_console(), broker or above, key, as_json=as_json))


def _prompt(given: str | None) -> str:
    if given not in (None, "-"):
        return str(given)
    typed = given is None and sys.stdin.isatty()
    text = "" if typed else sys.stdin.read()
    if not text:
        raise UsageError("There is no prompt.", hint='Give one: potluck infer --prompt "Hello".')
    return text


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} takes numbers such as 0,1, not {text!r}.") from None
    if any(number < 0 for number in numbers):
        raise UsageError(f"{option} takes no negative numbers.")
    return numbers


def _cuts(text: str | None) -> list[int] | None:
    return None if text is None else _numbers(text, "--cuts")


if __name__ == "__main__":
    main()
