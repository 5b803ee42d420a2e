"""Chat templates: what they get, what they refuse, and what they may not do."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from potluck.model import chat
from potluck.model.chat import ChatTemplate
from potluck.wire import limits
from potluck.wire.errors import RequestError

NOW = datetime(2024, 2, 29, 12, 30, tzinfo=UTC)
LONG = "{% set s = 'x' * 100000 %}"
IN_S = "{% for b in s %}{% endfor %}"
IN_S_IF = "{% for b in s if b == 'y' %}{% endfor %}"
DOUBLED = "{{% set n = namespace(s='x') %}}{{% for a in range(60) %}}{{% set n.s = {} %}}{{% endfor %}}"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}]


def rendered(source: str | None, messages: list[dict[str, str]] | None = None, **extra: object) -> str:
    template = ChatTemplate(source, bos="<s>", eos="</s>")
    return template.render(CHAT if messages is None else messages, now=NOW, extra=extra)


def test_model_without_a_template_gets_chatml_and_a_warning_flag() -> None:
    template = ChatTemplate(None)
    assert template.is_fallback
    assert template.render(CHAT, now=NOW) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    )
    assert not ChatTemplate("x").is_fallback


def test_template_gets_the_names_it_expects() -> None:
    assert rendered("{{ bos_token }}{{ messages[1].content }}{{ eos_token }}") == "<s>Hi <b></s>"
    assert rendered("{{ add_generation_prompt }}") == "True"
    assert rendered("{{ enable_thinking }}", enable_thinking=False) == "False"


def test_date_is_the_time_that_was_passed_in() -> None:
    assert rendered("{{ strftime_now('%d %b %Y') }}") == "29 Feb 2024"


def test_blocks_are_trimmed_as_transformers_does() -> None:
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\nX{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert rendered(source) == "XHi <b>\n"


def test_json_is_not_escaped_for_html_and_loops_can_be_left() -> None:
    assert rendered("{{ messages[1] | tojson }}") == '{"role": "user", "content": "Hi <b>"}'
    assert rendered("{% for m in messages %}{% break %}{% endfor %}ok") == "ok"
    assert rendered("{% generation %}text{% endgeneration %}") == "text"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ';' if not loop.last }}{% endfor %}",
            "1/2;2/2",
            id="position",
        ),
        pytest.param(
            "{% for k, v in messages[0].items() %}{{ k }}={{ v }},{% endfor %}",
            "role=system,content=Be brief.,",
            id="items of a dict",
        ),
        pytest.param("{% for k in {'a': 1, 'b': 2} %}{{ k }}{% endfor %}", "ab", id="keys of a dict"),
        pytest.param("{% for m in [] %}x{% else %}none{% endfor %}", "none", id="else"),
        pytest.param(
            "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ m.content }}{% endfor %}",
            "1Hi <b>",
            id="a condition",
        ),
        pytest.param(
            "{% for m in messages[::-1] %}{{ loop.index0 }}{{ loop.previtem.role if loop.previtem }}{% endfor %}",
            "01user",
            id="backwards",
        ),
        pytest.param(
            "{% for e in [1, [2, [3]], 4] recursive %}{{ loop.depth }}"
            "{{ loop(e) if e is sequence else e }}{% endfor %}",
            "1112223314",
            id="within itself",
        ),
        pytest.param(
            "{% macro m(l) %}{% for a in l %}{{ a }}{{ ',' if not loop.last }}{% endfor %}{{ caller() }}"
            "{% endmacro %}{% call m([1, 2]) %}!{% endcall %}",
            "1,2!",
            id="in a macro",
        ),
        pytest.param(
            "{{ 'ab' * 3 }}{{ 1 + 2 }}{{ [1] + [2] }}{{ 'a' ~ 1 ~ none }}", "ababab3[1, 2]a1None", id="sums"
        ),
        pytest.param("{% for a in 'abc' %}{{ a }}{% continue %}x{% endfor %}", "abc", id="continue"),
    ],
)
def test_loops_do_what_jinja_says(source: str, expected: str) -> None:
    assert rendered(source) == expected


def test_names_that_a_template_sets_do_not_lift_its_limit() -> None:
    names = "".join(
        f"{{% set {name} = 0 %}}" for name in ("loop", "step", "steps", "self", "range", "namespace")
    )
    with pytest.raises(RequestError, match=f"more than {chat.LOOP_STEPS} steps"):
        rendered(f"{names}{LONG}{{% for a in s %}}{IN_S}{{% endfor %}}")


def test_every_rendering_has_its_steps_for_itself() -> None:
    template = ChatTemplate("{% for a in range(60000) %}{% endfor %}ok")
    assert [template.render(CHAT, now=NOW) for _ in range(3)] == ["ok"] * 3


def test_refusal_of_the_template_reaches_the_client_as_it_is() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        rendered("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"
    assert caught.value.hint


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("{% if %}", id="a syntax error"),
        pytest.param("{{ messages[9].content.x }}", id="a message that is not there"),
        pytest.param("{{ 1 / 0 }}", id="a division by zero"),
        pytest.param(
            "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", id="an escape"
        ),
        pytest.param("{{ messages.append(1) }}", id="a change of its input"),
        pytest.param("{{ 'a' * 999999999 }}", id="a huge text"),
        pytest.param("{{ [0] * 999999999 }}", id="a huge list"),
        pytest.param("{{ 9 ** 9 ** 9 }}", id="a huge number"),
        pytest.param("{{ '%999999999d' % 1 }}", id="a wide number"),
        pytest.param("{{ 'a'.ljust(999999999) }}", id="a padded text"),
        pytest.param("{{ '{:>999999999}'.format(1) }}", id="a wide format"),
        pytest.param("{{ 'a' | center(999999999) }}", id="a centred text"),
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", id="loops"
        ),
        pytest.param(
            "{% for a in range(90000) %}{{ messages | string * 99 }}{% endfor %}", id="a long output"
        ),
        pytest.param(f"{LONG}{{% for a in s %}}{IN_S}{{% endfor %}}", id="loops over a text"),
        pytest.param(f"{LONG}{{% for a in s %}}{IN_S_IF}{{% endfor %}}", id="loops that skip every step"),
        pytest.param(
            "{% set s = [0] * 999 %}{% for a in s recursive %}{% if loop.depth < 9 %}{{ loop(s) }}{% endif %}"
            "{% endfor %}",
            id="loops within themselves",
        ),
        pytest.param(
            f"{LONG}{{% macro m() %}}{IN_S}{{% endmacro %}}{{% for a in s %}}{{{{ m() }}}}{{% endfor %}}",
            id="loops in a macro",
        ),
        pytest.param(
            f"{LONG}{{% for a in s | map('upper') %}}{IN_S}{{% endfor %}}", id="loops over a generator"
        ),
        pytest.param("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", id="a macro that calls itself"),
        pytest.param(
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
            id="a macro that calls itself twice",
        ),
        pytest.param(
            "{% set n = namespace(d=0) %}{% block b %}{% set n.d = n.d + 1 %}{% if n.d < 60 %}"
            "{{ self.b() }}{{ self.b() }}{% endif %}{% set n.d = n.d - 1 %}{% endblock %}",
            id="a block that calls itself twice",
        ),
        pytest.param(f"{DOUBLED.format('n.s + n.s')}", id="a text added to itself"),
        pytest.param(f"{DOUBLED.format('n.s ~ n.s')}", id="a text joined to itself"),
        pytest.param(
            "{% set n = namespace(s=[0]) %}{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
            id="a list added to itself",
        ),
        pytest.param("{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}", id="a deep expression"),
        pytest.param("x" * ((1 << 20) + 1), id="a huge template"),
        pytest.param("{% include '/etc/passwd' %}", id="another file"),
    ],
)
def test_template_that_fails_or_misbehaves_is_refused(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        rendered(source)
    assert caught.value.param == "messages"


def test_prompt_longer_than_the_limit_is_refused_naming_it() -> None:
    with pytest.raises(RequestError, match=str(limits.PROMPT_CHARS)):
        rendered(None, [{"role": "user", "content": "a" * limits.PROMPT_CHARS}])
