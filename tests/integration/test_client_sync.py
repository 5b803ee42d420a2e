"""`SyncClient`: the same cluster without asyncio."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from acceptance.cluster_world import FAST, World, free_port, idle, world
from potluck.runtime.sync_client import SyncClient
from potluck.wire.errors import (
    ContextExceededError,
    InvalidValueError,
    NoBrokerError,
    SettingsError,
    UsageError,
)
from potluck.wire.messages import Accepted, Delta, Finished
from potluck.wire.sampling import GREEDY
from tiny_models import write_tiny


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One stage, one slot."""
    folder = tmp_path_factory.mktemp("single")
    options = ("--slots", "1", "--context", "512", *FAST)
    with world(write_tiny(folder / "tiny.gguf"), folder, 1, *options) as made:
        yield made


@pytest.fixture
def client(single: World) -> Iterator[SyncClient]:
    """Connected; no thread of it is left afterwards."""
    before = threading.active_count()
    with SyncClient(single.address, timeout_s=30) as made:
        yield made
    assert threading.active_count() == before


def test_a_whole_answer(client: SyncClient) -> None:
    answer = client.complete("hello", max_tokens=12, sampling=GREEDY, ignore_eos=True)
    assert len(answer.tokens) == 12
    assert answer.finish.reason == "length"
    assert answer.finish.usage.completion_tokens == 12
    chat = client.complete(messages=[{"role": "user", "content": "hello"}], max_tokens=3, ignore_eos=True)
    assert len(chat.tokens) == 3


def test_a_stream_has_a_delta_for_every_token_and_the_same_text(client: SyncClient) -> None:
    whole = client.complete("hello", max_tokens=12, sampling=GREEDY, ignore_eos=True)
    first, *deltas, last = client.stream("hello", max_tokens=12, sampling=GREEDY, ignore_eos=True)
    assert isinstance(first, Accepted)
    assert isinstance(last, Finished)
    assert all(isinstance(delta, Delta) for delta in deltas)
    assert "".join(delta.text for delta in deltas if isinstance(delta, Delta)) == whole.text


def test_a_stream_that_is_left_frees_the_only_slot(client: SyncClient, single: World) -> None:
    for event in client.stream("hello", max_tokens=450, ignore_eos=True):
        if isinstance(event, Delta):
            break
    assert len(client.complete("hello", max_tokens=3, ignore_eos=True).tokens) == 3
    view = single.run(single.until(idle))
    assert view.tokens_out < 450


def test_closing_the_client_ends_its_stream(single: World) -> None:
    client = SyncClient(single.address)
    stream = client.stream("hello", max_tokens=450, ignore_eos=True)
    assert isinstance(next(stream), Accepted)
    stream.close()
    client.close()
    client.close()  # a second time does nothing
    single.run(single.until(idle))


@pytest.mark.filterwarnings("error")
def test_calls_after_close_say_that_the_client_is_closed(single: World) -> None:
    client = SyncClient(single.address)
    begun, fresh = (client.stream("hello", max_tokens=450, ignore_eos=True) for _ in range(2))
    assert isinstance(next(begun), Accepted)
    client.close()
    begun.close()
    for call in (client.state, lambda: client.complete("hello"), lambda: next(fresh)):
        with pytest.raises(UsageError, match="The client is closed"):
            call()
    gc.collect()
    single.run(single.until(idle))


@pytest.mark.filterwarnings("error")
def test_a_stream_that_is_read_on_after_close_says_so(single: World) -> None:
    client = SyncClient(single.address)
    stream = client.stream("hello", max_tokens=450, ignore_eos=True)
    assert isinstance(next(stream), Accepted)
    client.close()
    with pytest.raises(UsageError, match="The client is closed"):
        next(stream)
    del stream
    gc.collect()


def test_close_ends_what_another_thread_waits_for() -> None:
    client = SyncClient(f"127.0.0.1:{free_port()}")
    began, found = threading.Event(), []

    def ask() -> None:
        began.set()
        try:
            client.state(timeout_s=600)
        except UsageError as error:
            found.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    began.wait(10)
    client.close()
    thread.join(10)
    assert len(found) == 1
    assert "The client is closed" in found[0]


def test_errors_are_raised_and_the_client_goes_on(client: SyncClient) -> None:
    with pytest.raises(ContextExceededError, match="512"):
        client.complete(tokens=[9] * 600)
    with pytest.raises(InvalidValueError):
        list(client.stream("hello", max_tokens=0))
    assert client.complete("hello", max_tokens=2, ignore_eos=True).tokens
    assert client.state().ready


def test_several_threads_may_share_one_client(client: SyncClient) -> None:
    expected = client.complete("hello", max_tokens=8, sampling=GREEDY, ignore_eos=True).tokens
    found = []

    def ask() -> None:
        found.append(client.complete("hello", max_tokens=8, sampling=GREEDY, ignore_eos=True).tokens)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [expected] * 4


def test_a_broker_that_is_not_there_is_an_error_soon() -> None:
    with SyncClient(f"127.0.0.1:{free_port()}", timeout_s=0.2) as client:
        with pytest.raises(NoBrokerError, match="No broker answers"):
            client.state(timeout_s=0.2)
        with pytest.raises(NoBrokerError, match="No broker answers"):
            client.complete("hello")


def test_an_address_that_is_none_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with pytest.raises(SettingsError, match="not an address"):
        SyncClient("host:notaport")
    assert threading.active_count() == before
