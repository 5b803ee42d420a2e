"""Names for the things that are counted, so that a slot is never passed where an epoch belongs."""

from __future__ import annotations

from typing import NewType

DeviceName = NewType("DeviceName", str)
"""The name a person gave a machine (`node.name`), unique in a cluster."""

StageId = NewType("StageId", str)
"""One run of one stage worker: the device's name and the worker's start, e.g. `mini-03/5f2c`. A restart is a new id."""

ClientId = NewType("ClientId", str)
"""One connection of one client to the control socket."""

RequestId = NewType("RequestId", str)
"""One prompt and its answer, from submission to its last token."""

ChainId = NewType("ChainId", int)
"""A chain's index within its plan, from 0."""

Epoch = NewType("Epoch", int)
"""Grows with every plan. A frame of an older epoch is dropped wherever it arrives."""

SlotId = NewType("SlotId", int)
"""A sequence's place in the KV cache of every stage of one chain, 0 <= slot < slots."""

BatchId = NewType("BatchId", int)
"""A micro-batch, unique within one epoch of one broker, growing."""

TokenId = NewType("TokenId", int)
"""A token's index in the model's vocabulary."""
