"""Turns a chat into the prompt its model was trained on, by the Jinja template inside the model's file.

The template is a stranger's program: it runs in Jinja's sandbox, its prompt is no longer than one may be, sums and
products make no huge text or number, and its steps (of loops, and calls of macros and blocks) are counted.
Without a template ChatML is used, and `is_fallback` says so.
Templates expect the names that transformers gives them: messages, add_generation_prompt, bos_token, eos_token,
raise_exception, strftime_now, tojson, loop controls and {% generation %}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

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
"""Steps that one rendering may take: of all loops, and calls of its macros and blocks. As many in its range()s."""
_CALL_STEPS: Final = 10
"""What a call of a macro or block costs."""
_STEP: Final = "steps"
_JOINED: Final = "joined text"
_STEPS_LEFT: Final = "steps left"
"""Names of filters and of a variable with a space in them: a template can't write or set them."""

_PADDING: Final = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"})
"""Methods of str that make a long text out of a number. Chat templates have no columns to align."""

_LONG: Final = (str, list, tuple)


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
                    "range": _limited_range(_Steps()),
                    _STEPS_LEFT: _Steps(),
                }
            ):
                length += len(piece)
                _check_length(length)
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
            environment = _environment()
            tree = _Counted().visit(environment.parse(self._source))
            self._compiled = environment.from_string(tree)
        return self._compiled


class _RefusedError(Exception):
    """The template called raise_exception."""


def _check_length(chars: int) -> None:
    """Raises RequestError for more than a prompt may have."""
    if chars > limits.PROMPT_CHARS:
        raise RequestError(
            f"The chat becomes a prompt of more than {limits.PROMPT_CHARS} characters.",
            hint="Send fewer or shorter messages.",
            param="messages",
        )


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


class _Steps:
    """What is left of LOOP_STEPS, for one rendering."""

    def __init__(self) -> None:
        self._left = LOOP_STEPS

    def take(self, steps: int) -> None:
        """Raises SecurityError when there are not as many left."""
        self._left -= steps
        if self._left < 0:
            raise SecurityError(f"its loops have more than {LOOP_STEPS} steps")


def _limited_range(left: _Steps) -> Callable[..., range]:
    """Python's range; all of one rendering share `left`, so that none becomes a huge list either."""

    def limited(*bounds: int) -> range:
        steps = range(*bounds)
        left.take(len(steps))
        return steps

    return limited


@pass_context
def _take(context: Context, steps: int) -> bool:
    context[_STEPS_LEFT].take(steps)
    return True


def _joined(parts: Sequence[object]) -> str:
    """What `~` does, with a bound on the text."""
    texts = []
    length = 0
    for part in parts:
        text = str(part)
        length += len(text)
        _check_length(length)
        texts.append(text)
    return "".join(texts)


_Repeated: TypeAlias = nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block


class _Counted(NodeTransformer):
    """Puts steps at the start of everything that can run more often than it is written, and bounds `~`.

    The steps stand in the body, not around what is looped over: so `loop` knows as much as before, and the inner calls
    of a recursive loop count, too.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja's names
        self.generic_visit(node)
        if node.test is None:
            return self._with_steps(1, node)
        # A step that the condition skips never comes to the body.
        node.test = nodes.And(_steps(1, node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._with_steps(_CALL_STEPS, node)

    visit_CallBlock = visit_Macro  # noqa: N815
    visit_Block = visit_Macro  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)

    def _with_steps(self, steps: int, node: _Repeated) -> nodes.Node:
        node.body.insert(0, nodes.ExprStmt(_steps(steps, node.lineno), lineno=node.lineno))
        return node


def _steps(steps: int, line: int) -> nodes.Expr:
    """An expression that takes so many steps and is true."""
    return nodes.Filter(nodes.Const(steps, lineno=line), _STEP, [], [], None, None, lineno=line)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, closed further against texts and numbers that are huge at once."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed")
        if operator == "%" and isinstance(left, str):
            raise SecurityError("formatting with % is not allowed")
        if operator == "+" and isinstance(left, _LONG) and isinstance(right, _LONG):
            _check_length(len(left) + len(right))
        if operator == "*":
            for part, times in ((left, right), (right, left)):
                if isinstance(part, _LONG) and isinstance(times, int):
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
    environment.filters |= {"tojson": _tojson, _STEP: _take, _JOINED: _joined}
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
