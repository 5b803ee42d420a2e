"""Turns a chat into the prompt its model was trained on, by the Jinja template inside the model's file.

The template is a stranger's program: it runs in Jinja's sandbox, can make no text longer than a prompt may be, and no
number or loop that would hold the process up. Without a template ChatML is used, and `is_fallback` says so.
Templates expect the names that transformers gives them: messages, add_generation_prompt, bos_token, eos_token,
raise_exception, strftime_now, tojson, loop controls and {% generation %}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from potluck.wire import limits
from potluck.wire.errors import RequestError

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATE_CHARS: Final = 1 << 20
LOOP_STEPS: Final = 100_000
"""Steps of all range() loops of one rendering together."""

_PADDING: Final = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"})
"""Methods of str that make a long text out of a number. Chat templates have no columns to align."""


class ChatTemplate:
    """A model's chat template. `source` is Jinja, or None for ChatML; `bos` and `eos` are the tokens' text."""

    def __init__(self, source: str | None, *, bos: str = "", eos: str = "") -> None:
        self.is_fallback = source is None
        self._source = CHATML if source is None else source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._compiled: Template | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        now: datetime,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for `messages` (each with `role` and `content`).

        `now` is what a template gets that writes the date; `extra` are further names (tools, enable_thinking).
        Raises RequestError (param "messages") when the template refuses the chat, fails or makes too long a text.
        """
        try:
            template = self._template()
            pieces: list[str] = []
            length = 0
            for piece in template.generate(
                {
                    **(extra or {}),
                    **self._tokens,
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                    "raise_exception": _raise,
                    "strftime_now": now.strftime,
                    "range": _limited_range(),
                }
            ):
                length += len(piece)
                if length > limits.PROMPT_CHARS:
                    raise RequestError(
                        f"The chat becomes a prompt of more than {limits.PROMPT_CHARS} characters.",
                        hint="Send fewer or shorter messages.",
                        param="messages",
                    )
                pieces.append(piece)
        except RequestError:
            raise
        except _RefusedError as refusal:
            raise RequestError(
                f"The model's chat template refuses the messages: {refusal}"[: limits.TEXT_CHARS],
                hint="Change the roles or their order as it says.",
                param="messages",
            ) from None
        # A template is a program: it can fail in any way a program can.
        except Exception as error:
            raise RequestError(
                f"The model's chat template fails: {type(error).__name__}: {error}"[:1_000],
                hint="Send a plain prompt instead, or use a model file with another template.",
                param="messages",
            ) from error
        return "".join(pieces)

    def _template(self) -> Template:
        if self._compiled is None:
            if len(self._source) > TEMPLATE_CHARS:
                raise TemplateError(
                    f"it has {len(self._source)} characters; at most {TEMPLATE_CHARS} are accepted"
                )
            self._compiled = _environment().from_string(self._source)
        return self._compiled


class _RefusedError(Exception):
    """The template called raise_exception."""


def _raise(message: object) -> None:
    raise _RefusedError(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: without escaping for HTML, unlike Jinja's own filter."""
    if indent is not None and indent > 16:
        raise SecurityError("the indent is too wide")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _limited_range() -> Callable[..., range]:
    """Python's range, for one rendering: all of them together have no more than LOOP_STEPS steps."""
    left = LOOP_STEPS

    def limited(*bounds: int) -> range:
        nonlocal left
        steps = range(*bounds)
        left -= len(steps)
        if left < 0:
            raise SecurityError(f"its loops have more than {LOOP_STEPS} steps")
        return steps

    return limited


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, closed further against texts and numbers that are huge at once."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not allowed")
        if operator == "*":
            for part, times in ((left, right), (right, left)):
                if isinstance(part, str | list | tuple) and isinstance(times, int):
                    if len(part) * times > limits.PROMPT_CHARS:
                        raise SecurityError("a repeated text is too long")
                elif isinstance(part, int) and part.bit_length() > 64:
                    raise SecurityError("a number is too large")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _PADDING:
            return False
        return bool(super().is_safe_attribute(obj, attr, value))


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    for name in ("center", "format", "indent", "wordwrap", "xmlattr", "urlize", "pprint", "batch", "slice"):
        environment.filters.pop(name, None)
    environment.filters["indent"] = _indent
    for name in ("lipsum", "cycler", "joiner"):
        environment.globals.pop(name, None)
    return environment


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's filter with a bound on the width."""
    space = width if isinstance(width, str) else " " * min(width, 64)
    lines = [line if not (line or blank) else space + line for line in text.split("\n")]
    if not first and lines:
        lines[0] = lines[0].removeprefix(space)
    return "\n".join(lines)


__all__ = ["CHATML", "ChatTemplate"]
