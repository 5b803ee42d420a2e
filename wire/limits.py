"""How much a peer may send. Every decoder checks these before it builds anything from a peer's bytes."""

from __future__ import annotations

PROTOCOL_VERSION = 1
MAGIC = b"PTLK"

CONTROL_BODY_BYTES = 4 << 20
"""One control message. The largest is a prompt with its sampling settings."""

DATA_BODY_BYTES = 1 << 20
"""The description of one micro-batch, without its arrays."""

ARRAY_BYTES = 256 << 20
"""One array of a data frame: 8,192 tokens of width 8,192 in f32."""

PROBE_BYTES = 16 << 20
"""One frame that measures a link."""

FRAMES_PER_MESSAGE = 8
"""Parts of one multipart message after the routing identity."""

PROMPT_CHARS = 2_000_000
PROMPT_TOKENS = 1_048_576
CHAT_MESSAGES = 4_096
STOP_STRINGS = 16
STOP_CHARS = 512
LOGIT_BIASES = 1_024
TOP_LOGPROBS = 20

BATCH_TOKENS = 8_192
BATCH_SPANS = 1_024
SLOTS = 1_024
STAGES = 256
LAYERS = 4_096
USERS = 65_536
SLICES = 64
"""Slices that one stage is asked to hold besides what it serves."""
MIRRORS = 4
"""Stages that one stage is asked to copy its slots to."""
JOBS = 1_000
"""Jobs in one answer."""
JOB_WAIT_S = 60
"""How long a question about a job may wait for its end."""

TIMEOUT_S = 604_800
"""The longest time that a request can be given: a week."""

NAME_CHARS = 128
TEXT_CHARS = 16_384
"""Any other text a peer may send: an error's detail, a version, an endpoint."""
