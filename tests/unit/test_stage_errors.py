"""A stage's errors on their way to the broker: where, in which phase, and what to do next, whoever raised them."""

from __future__ import annotations

import pytest

from potluck.stage.pipeline import attempt
from potluck.stage.state import StageIdentity
from potluck.wire.errors import EngineError, OutOfMemoryError, Phase, PotluckError

ME = StageIdentity("mini/1", "mini", "0", "fake", "tcp://mini:1")


def raising(error: Exception) -> PotluckError:
    """What comes of work on the lane that ends with this."""

    def work() -> None:
        raise error

    result = attempt(work)
    assert isinstance(result, PotluckError)
    return result


@pytest.mark.parametrize(
    "error",
    [EngineError("It broke."), MemoryError(), ValueError("a bug"), OutOfMemoryError("Full.", hint="Less.")],
)
def test_every_error_names_device_stage_phase_and_what_to_do(error: Exception) -> None:
    placed = ME.placed(raising(error), Phase.LOAD)
    assert (placed.device, placed.stage, placed.phase) == ("mini", "mini/1", Phase.LOAD)
    assert placed.hint
    assert type(placed) is type(raising(error))


def test_what_an_error_knows_itself_is_kept() -> None:
    placed = ME.placed(EngineError("It broke.", hint="Mend it.", phase=Phase.SLICE, slot=3), Phase.LOAD)
    assert (placed.hint, placed.phase, placed.facts) == ("Mend it.", Phase.SLICE, {"slot": 3})
