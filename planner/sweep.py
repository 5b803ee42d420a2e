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
Bools = NDArray[np.bool_]

_CACHED = 1 << 16
"""Numbers of an intermediate result that stay in the processor's cache."""
_BLOCK = 32
"""Ends of layers at a time where memory allows short runs only: from starts that none of them can have, nothing is
computed.
"""
_NARROW = 0.55
"""Blocks that have more than this share of all starts and ends are slower than one of everything."""

Join = Literal["sum", "max"]
_JOINS = {"sum": np.add, "max": np.maximum}


@dataclass(frozen=True)
class Sweep:
    """`steps`: per device float64[positions, positions], from start to end. `links` float64[devices, devices], `first`
    and `last` float64[devices]: what it costs to begin and to end there. Values above `cap` may be given as infinite.
    """

    join: Join
    steps: Sequence[Floats]
    links: Floats
    first: Floats
    last: Floats
    cap: float = np.inf

    def run(self, most: int, wanted: Bools | None = None) -> Floats:
        """float64[sets, devices, positions]: the best values of all sets of up to `most` devices.

        `wanted` bool[sets]: the only ones that are computed. With a set its subsets have to be wanted.
        """
        count, positions = len(self.steps), len(self.steps[0])
        join = _JOINS[self.join]
        value = np.full((1 << count, count, positions), np.inf)
        masks = np.arange(1 << count)
        sizes = np.array([mask.bit_count() for mask in range(1 << count)])
        if wanted is not None:
            sizes[~wanted] = 0
        blocks = [_blocks(step) for step in self.steps]
        highest = self.cap - self._still()
        for size in range(1, most + 1):
            of_size = masks[sizes == size]
            for device in range(count):
                sets = of_size[(of_size >> device) & 1 == 1]
                if size == 1:
                    if len(sets):
                        value[1 << device, device] = join(self.first[device], self.steps[device][0])
                    continue
                before = join(value[sets ^ (1 << device)], self.links[:, device][None, :, None]).min(axis=1)
                useful = (before < highest).any(axis=1)
                sets, before = sets[useful], before[useful]
                for low, high, start, end in blocks[device] if len(sets) else ():
                    step = self.steps[device][None, low:high, start:end]
                    chunk = max(1, _CACHED // step.size)
                    for at in range(0, len(sets), chunk):
                        value[sets[at : at + chunk], device, start:end] = join(
                            before[at : at + chunk, low:high, None], step
                        ).min(axis=1)
        return value

    def _still(self) -> Floats:
        """float64[positions]: the least that the layers from there on take, whoever computes them."""
        positions = len(self.steps[0])
        still = np.zeros(positions)
        if self.cap < np.inf and self.join == "sum":
            least = np.minimum.reduce(list(self.steps))
            for start in range(positions - 2, -1, -1):
                still[start] = (least[start, start + 1 :] + still[start + 1 :]).min()
        return still * (1.0 - 1e-9) - self.cap * 1e-9 if self.cap < np.inf else still

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


def _blocks(step: Floats) -> list[tuple[int, int, int, int]]:
    """Blocks of ends, with the starts that any of them can have: first start, end of starts, first end, end of ends."""
    blocks = []
    positions = len(step)
    for at in range(0, positions, _BLOCK):
        starts = np.flatnonzero(np.isfinite(step[:, at : at + _BLOCK]).any(axis=1))
        if len(starts):
            blocks.append((int(starts[0]), int(starts[-1]) + 1, at, min(at + _BLOCK, positions)))
    area = sum((high - low) * (end - start) for low, high, start, end in blocks)
    return blocks if area < _NARROW * positions**2 else [(0, positions, 0, positions)]
