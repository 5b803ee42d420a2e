"""Every error a person can meet, in one tree: what happened, where, in which phase, and what to do next.

A class's docstring is its default message. `code` and `http_status` are what REST clients see (OpenAI's shape);
`exit_code` is what a command returns. Raise the most specific class with the facts in `what` and the next step in
`hint`; the device, stage and phase are added by whoever knows them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Phase(StrEnum):
    """Where in its life a stage or request was when the error happened."""

    START = "start"
    JOIN = "join"
    MEASURE = "measure"
    PLAN = "plan"
    SLICE = "slice"
    LOAD = "load"
    SERVE = "serve"
    PREFILL = "prefill"
    DECODE = "decode"
    SUBMIT = "submit"


class PotluckError(Exception):
    """Something went wrong."""

    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        what: str = "",
        *,
        hint: str = "",
        device: str | None = None,
        stage: str | None = None,
        phase: Phase | None = None,
        param: str | None = None,
        **facts: int | float | str,
    ) -> None:
        self.what = what or (type(self).__doc__ or "").strip().splitlines()[0]
        self.hint = hint
        self.device = device
        self.stage = stage
        self.phase = phase
        self.param = param
        self.facts = facts
        super().__init__(self.what)

    def __str__(self) -> str:
        where = ", ".join(
            part
            for part in (
                f"device {self.device}" if self.device else "",
                f"stage {self.stage}" if self.stage else "",
                f"phase {self.phase}" if self.phase else "",
            )
            if part
        )
        return "".join([self.what, f" [{where}]" if where else "", f" {self.hint}" if self.hint else ""])


class UsageError(PotluckError):
    """The command or a setting can't be used as given."""

    code = "invalid_usage"
    kind = "invalid_request_error"
    http_status = 400
    exit_code = 2


class SettingsError(UsageError):
    """A setting is wrong."""

    code = "invalid_settings"


class RequestError(PotluckError):
    """The request can't be served as it stands."""

    code = "invalid_request"
    kind = "invalid_request_error"
    http_status = 400


class InvalidValueError(RequestError):
    """A value of the request is outside what is supported."""

    code = "invalid_value"


class ContextExceededError(RequestError):
    """The prompt does not fit the context."""

    code = "exceed_context_size"


class UnknownModelError(RequestError):
    """No model of that name is served here."""

    code = "model_not_found"
    http_status = 404


class UnknownJobError(RequestError):
    """There is no job of that key."""

    code = "job_not_found"
    http_status = 404


class JobConflictError(RequestError):
    """The key names another job already."""

    code = "job_conflict"
    http_status = 409


class JobsOffError(RequestError):
    """This broker keeps no journal, so it takes no jobs."""

    code = "jobs_off"
    http_status = 501


class UnavailableError(PotluckError):
    """No whole chain is ready to serve."""

    code = "unavailable"
    kind = "unavailable_error"
    http_status = 503
    exit_code = 3


class NoBrokerError(UnavailableError):
    """No broker answers."""

    code = "no_broker"


class ClosingError(UnavailableError):
    """The broker is closing."""

    code = "closing"


class QueueFullError(UnavailableError):
    """More requests wait than the broker keeps."""

    code = "queue_full"
    kind = "rate_limit_error"
    http_status = 429
    exit_code = 1


class JournalError(UnavailableError):
    """The journal of jobs can't be used."""

    code = "journal_failed"
    exit_code = 1


class JournalBusyError(JournalError):
    """Another broker uses this journal."""

    code = "journal_in_use"


class RequestTimeoutError(PotluckError):
    """The request was not finished in time."""

    code = "timeout"
    kind = "timeout_error"
    http_status = 504


class CancelledError(PotluckError):
    """The request was cancelled."""

    code = "cancelled"
    http_status = 499
    exit_code = 130


class StageError(PotluckError):
    """A stage failed."""

    code = "stage_failed"


class StageLostError(StageError):
    """A stage was lost."""

    code = "stage_lost"


class ModelError(PotluckError):
    """The model file can't be used."""

    code = "model_unusable"


class NotGgufError(ModelError):
    """The file is not a GGUF model."""

    code = "not_gguf"


class TruncatedModelError(ModelError):
    """The model file ends before its last tensor."""

    code = "truncated_model"


class UnsupportedArchitectureError(ModelError):
    """Potluck does not know how to cut this architecture."""

    code = "unsupported_architecture"


class ForbiddenCutError(ModelError):
    """The architecture can't be cut at this layer."""

    code = "forbidden_cut"


class EngineError(StageError):
    """The engine failed to compute."""

    code = "engine_failed"


class EngineHangsError(EngineError):
    """The engine hangs."""

    code = "engine_hangs"


class OutOfMemoryError(EngineError):
    """There is not enough memory."""

    code = "out_of_memory"


class PlanError(PotluckError):
    """The devices at hand can't hold the model."""

    code = "no_plan"
    kind = "unavailable_error"
    http_status = 503


class PortInUseError(UsageError):
    """The port is taken by another program."""

    code = "port_in_use"
    exit_code = 1


class WireError(PotluckError):
    """A peer sent something that is not of this protocol."""

    code = "wire_error"


class FrameTooLargeError(WireError):
    """A frame is larger than the limit."""

    code = "frame_too_large"


class VersionMismatchError(WireError):
    """The peer speaks another version of the protocol."""

    code = "version_mismatch"


class MalformedError(WireError):
    """A frame is not what its kind requires."""

    code = "malformed"


def error_class(code: str) -> type[PotluckError]:
    """The class with this code, or PotluckError for a code that this version does not know."""
    return _BY_CODE.get(code, PotluckError)


def _tree(root: type[PotluckError]) -> dict[str, type[PotluckError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_CODE = _tree(PotluckError)
