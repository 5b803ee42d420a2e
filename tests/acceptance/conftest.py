"""What the acceptance tests share: one cluster of three stages over the real model, and its slices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.cluster_world import World, world


@pytest.fixture(scope="package", autouse=True)
def slices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Slices are written once for all of these tests, and not into the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POTLUCK_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="package")
def exact(smollm2_path: Path, slices: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """SmolLM2 over three stages with --exact and 16 slots."""
    folder = tmp_path_factory.mktemp("exact")
    with world(smollm2_path, folder, 3, "--exact", "--slots", "16", "--context", "512") as made:
        yield made


@pytest.fixture(scope="package")
def half(smollm2_path: Path, slices: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """SmolLM2 over two stages with f16 between them, and one slot: the second of two requests has to wait."""
    folder = tmp_path_factory.mktemp("half")
    options = ("--activation", "f16", "--slots", "1", "--context", "512")
    with world(smollm2_path, folder, 2, *options) as made:
        yield made
