"""The dynamic program behind exact plans: the best chain of every set of devices at once. Pure.

A chain is built stage by stage. For a set of devices, its last member and the layer where that one ends, the best value
follows from the best values of the set without it:

    value[set, last, end] = min over start of  join(min over before of join(value[set - last, before, start],
                                                     link[before, last]), step[last][start, end])

With `join` = sum that is the shortest trip, with `join` = max the smallest bottleneck. Sets are bit masks; layers are
positions among the allowed cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_CHUNK = 8
"""Sets at a time: their intermediate results stay in the processor's cache."""

Join = Literal["sum", "max"]
_JOINS = {"sum": np.add, "max": np.maximum}


@dataclass(frozen=True)
class Sweep:
    """`steps`: per device float64[positions, positions], from start to end. `links` float64[devices, devices], `first`
    and `last` float64[devices]: what it costs to begin and to end there.
    """

    join: Join
    steps: Sequence[Floats]
    links: Floats
    first: Floats
    last: Floats

    def run(self, most: int) -> Floats:
        """float64[sets, devices, positions]: the best values of all sets of up to `most` devices."""
        count, positions = len(self.steps), len(self.steps[0])
        join = _JOINS[self.join]
        value = np.full((1 << count, count, positions), np.inf)
        masks = np.arange(1 << count)
        sizes = np.array([mask.bit_count() for mask in range(1 << count)])
        for size in range(1, most + 1):
            for device in range(count):
                sets = masks[(sizes == size) & ((masks >> device) & 1 == 1)]
                if size == 1:
                    value[1 << device, device] = join(self.first[device], self.steps[device][0])
                    continue
                before = join(value[sets ^ (1 << device)], self.links[:, device][None, :, None]).min(axis=1)
                useful = np.isfinite(before).any(axis=1)
                sets, before = sets[useful], before[useful]
                for at in range(0, len(sets), _CHUNK):
                    chunk = before[at : at + _CHUNK]
                    value[sets[at : at + _CHUNK], device] = join(
                        chunk[:, :, None], self.steps[device][None, :, :]
                    ).min(axis=1)
        return value

    def ends(self, value: Floats) -> Floats:
        """float64[sets, devices]: the value of the whole model, the broker's leg included."""
        return np.asarray(_JOINS[self.join](value[:, :, -1], self.last[None, :]))

    def best(self, value: Floats) -> Floats:
        """float64[sets]: the value of each set's best chain; infinite where it has none."""
        return np.asarray(self.ends(value).min(axis=1))

    def trace(self, value: Floats, mask: int) -> list[tuple[int, int, int]]:
        """The best chain of a set: device, start and end position of each stage, in order."""
        join = _JOINS[self.join]
        device = int(np.argmin(self.ends(value)[mask]))
        end = value.shape[2] - 1
        stages: list[tuple[int, int, int]] = []
        while True:
            mask ^= 1 << device
            if mask == 0:
                stages.append((device, 0, end))
                return stages[::-1]
            before = join(value[mask], self.links[:, device][:, None])
            start = int(np.argmin(join(before.min(axis=0), self.steps[device][:, end])))
            stages.append((device, start, end))
            device, end = int(np.argmin(before[:, start])), start
