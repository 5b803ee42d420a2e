"""What every test may use: Hypothesis profiles with a printed seed, and the path of a small real model."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from potluck.tools.demo import demo_model
from potluck.wire.errors import UsageError

settings.register_profile("ci", print_blob=True, derandomize=False, deadline=None)
settings.register_profile("quick", parent=settings.get_profile("ci"), max_examples=25)
settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose Hypothesis's seed here, so that a run can be repeated."""
    if config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = str(secrets.randbits(32))


def pytest_report_header(config: pytest.Config) -> str:
    return f"repeat this run with --hypothesis-seed={config.getoption('hypothesis_seed')}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Brokers that tests start keep their journals here, not in the user's state folder."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POTLUCK_STATE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1), read from the demo extra's package without importing it."""
    try:
        return demo_model()
    except UsageError as error:
        pytest.fail(str(error))


def pytest_unconfigure() -> None:
    """llama_cpp keeps two files open for its whole life; an interpreter that ends says so after the summary."""
    utilities = sys.modules.get("llama_cpp._utils")
    for name in ("outnull_file", "errnull_file"):
        opened = getattr(utilities, name, None)
        if opened is not None:
            opened.close()
