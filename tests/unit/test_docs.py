"""The documents say what the code says: each fact that stands in both is compared, so that neither drifts alone.

A failing test prints the line that the document should have. What a field means is prose and not compared.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import shlex
import struct
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml
from msgspec import inspect

from potluck.broker.cli import main as broker_command
from potluck.broker.config import BrokerConfig
from potluck.model.architectures import supported
from potluck.runtime.settings import Settings, defaults_for, load_settings, parse_settings
from potluck.stage.cli import main as stage_command
from potluck.tools.cli import main as potluck_command
from potluck.wire import errors, forecast, frames, limits, measures, messages, sampling

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
PROTOCOL = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")
SETTINGS_FILE = ROOT / "configs/potluck.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
}
COMMANDS: dict[str, click.Command] = {
    "potluck": potluck_command,
    "potluck-broker": broker_command,
    "potluck-stage": stage_command,
}


def section(document: str, title: str) -> str:
    """The text under a heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {title}$", document, re.MULTILINE)
    assert found is not None, f"there is no heading {title!r}"
    rest = document[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest if end is None else rest[: end.start()]


def rows(text: str) -> list[list[str]]:
    """The body rows of a section's first table, without backticks."""
    table = re.search(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    lines = table[0].splitlines()[2:] if table else []
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


# ---- the protocol


def bounds(low: object, high: object, above: object = None) -> str:
    if above is not None:
        return f" above {above:g}, to {high:g}"
    if low is None and high is None:
        return ""
    ends = [f"2^{n.bit_length() - 1}" if isinstance(n, int) and n >= 1 << 40 else n for n in (low, high)]
    shown = [f"{end:g}" if isinstance(end, float) else str(end) for end in ends if end is not None]
    return f" {'..'.join(shown)}" if low is not None else f" ..{shown[0]}"


def described(kind: Any) -> str:
    """A field's type and bounds in the words of docs/protocol.md, "Conventions"."""
    match kind:
        case inspect.IntType():
            return "int" + bounds(kind.ge, kind.le if kind.lt is None else kind.lt - 1)
        case inspect.FloatType():
            return "float" + bounds(kind.ge, kind.le, kind.gt)
        case inspect.StrType(pattern=str(pattern)):
            return "one of " + ", ".join(pattern.strip("^()$").split("|"))
        case inspect.StrType():
            return "text" + bounds(kind.min_length or 0 if kind.max_length else None, kind.max_length)
        case inspect.BoolType():
            return "bool"
        case inspect.NoneType():
            return "null"
        case inspect.EnumType(cls=cls) | inspect.StructType(cls=cls):
            return cls.__name__
        case inspect.VarTupleType():
            count = bounds(kind.min_length or 0 if kind.max_length else None, kind.max_length)
            return f"array{count} of ({described(kind.item_type)})"
        case inspect.TupleType(item_types=parts):
            return f"pair of ({', '.join(map(described, parts))})"
        case inspect.DictType():
            count = bounds(kind.min_length or 0, kind.max_length)
            return f"map{count} of ({described(kind.key_type)}) to ({described(kind.value_type)})"
        case inspect.UnionType(types=parts):
            return " or ".join(map(described, parts))
        case _:
            raise AssertionError(f"describe {kind} here and in docs/protocol.md")


def default_of(field: inspect.Field) -> str:
    if field.required:
        return "required"
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    match default:
        case None:
            return "null"
        case bool():
            return str(default).lower()
        case str():
            return f'"{default}"'
        case msgspec.Struct():
            return "all defaults"
        case tuple() | dict():
            return "empty"
        case _:
            return f"{default:g}"


def structs_of(module: Any) -> Iterator[type[msgspec.Struct]]:
    for name, value in vars(module).items():
        ours = (
            isinstance(value, type)
            and issubclass(value, msgspec.Struct)
            and value.__module__ == module.__name__
        )
        if ours and not name.startswith("_"):
            yield value


STRUCTS = [
    *structs_of(messages),
    *structs_of(measures),
    *structs_of(forecast),
    *structs_of(sampling),
]


def heading(kind: type) -> str:
    number = messages.KIND_OF.get(kind)
    return kind.__name__ if number is None else f"{number} {kind.__name__}"


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_message_and_part_has_its_table_of_fields_in_order(kind: type[msgspec.Struct]) -> None:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    text = section(PROTOCOL, heading(kind))
    expected = [[field.encode_name, described(field.type), default_of(field)] for field in info.fields]
    assert [row[:3] for row in rows(text)] == expected
    assert ("as an array" in text.partition("|")[0].lower()) == info.array_like


def test_no_kind_stands_in_the_protocol_that_does_not_exist() -> None:
    headings = re.findall(r"^#+ (\d+) (\w+)$", PROTOCOL, re.MULTILINE)
    assert {int(number): name for number, name in headings} == {
        number: kind.__name__ for number, kind in messages.KINDS.items()
    }


@pytest.mark.parametrize("kind", messages.KINDS.values(), ids=lambda kind: kind.__name__)
def test_every_message_says_how_many_arrays_it_has(kind: type) -> None:
    low, high = messages._ARRAYS.get(kind, (0, 0))
    said = re.search(r"Arrays: (\d)(?: or (\d))?", section(PROTOCOL, heading(kind)))
    assert (low, high) == ((0, 0) if said is None else (int(said[1]), int(said[2] or said[1])))


def test_header_layout_is_the_one_in_the_code() -> None:
    table = rows(section(PROTOCOL, "Header"))
    sizes = {"bytes": "4s", "u8": "B", "u16": "H", "u64": "Q"}
    layout = "<" + "".join(sizes[row[2]] for row in table)
    assert layout == frames._HEADER.format
    at = 0
    for offset, size, kind, *_ in table:
        assert (int(offset), int(size)) == (at, struct.calcsize(sizes[kind]))
        at += int(size)
    assert at == frames.HEADER_BYTES


def test_every_limit_stands_in_the_protocol_with_its_value() -> None:
    found = {row[0]: row[1] for row in rows(section(PROTOCOL, "Limits"))}
    names = [name for name in vars(limits) if name.isupper()]
    values = {name: getattr(limits, name) for name in names}
    assert found == {
        name: value.decode() if isinstance(value, bytes) else str(value) for name, value in values.items()
    }


def test_every_phase_stands_in_the_protocol() -> None:
    assert re.findall(r"`(\w+)`", section(PROTOCOL, "Phase")) == [phase.value for phase in errors.Phase]


def test_every_error_code_stands_in_the_protocol_with_its_statuses() -> None:
    found = {row[0]: row[1:4] for row in rows(section(PROTOCOL, "Error codes"))}
    assert found == {
        code: [kind.__name__, str(kind.http_status), str(kind.exit_code)]
        for code, kind in errors._BY_CODE.items()
    }


def test_times_and_counts_of_the_protocol_are_those_of_the_code() -> None:
    table = rows(section(PROTOCOL, "Times and counts"))
    for name, value, *_ in table:
        module, _, attribute = name.rpartition(":")
        holder: Any = importlib.import_module("potluck." + module.removesuffix(".py").replace("/", "."))
        owner, _, field = attribute.rpartition(".")
        if owner:
            defaults = {one.name: one.default for one in dataclasses.fields(getattr(holder, owner))}
            real = defaults[field]
        else:
            real = getattr(holder, field)
        assert float(value) == float(real), f"{name} is {real}"
    config = {field.name for field in dataclasses.fields(BrokerConfig) if field.name.endswith("_s")}
    assert config <= {name.rpartition(".")[2] for name, *_ in table}


# ---- the architecture


def test_every_dependency_has_its_reason() -> None:
    required = [*PROJECT["dependencies"], *chain.from_iterable(PROJECT["optional-dependencies"].values())]
    names = {re.split(r"[<>=!;\[ ]", requirement, maxsplit=1)[0] for requirement in required}
    lines = re.findall(r"^- \*\*([\w.-]+)\*\*(.*)$", section(ARCHITECTURE, "Dependencies"), re.MULTILINE)
    assert {name for name, _ in lines} == names
    for name, reason in lines:
        assert len(reason) > 30, f"{name} needs a reason"


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md"])
def test_the_listed_architectures_are_the_supported_ones(name: str) -> None:
    title = "Supported models" if name == "README.md" else "The table of architectures"
    assert sorted(row[0] for row in rows(section(DOCUMENTS[name], title))) == list(supported())


def names_in(tree: ast.Module | ast.ClassDef) -> set[str]:
    """Functions, classes, methods, fields and constants of a module or class."""
    found: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name):
                found.add(name)
                found |= {f"{name}.{inner}" for inner in names_in(node)}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case _:
                pass
    return found


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_file_and_function_that_a_document_names_exists(name: str) -> None:
    code = "(?:wire|model|planner|broker|stage|runtime|tools|tests)"
    for path, function in re.findall(rf"`({code}/[\w/]+\.(?:py|toml))(?::([\w.]+))?`", DOCUMENTS[name]):
        assert (ROOT / path).is_file(), f"{name} names {path}"
        if function and path.endswith(".py"):
            known = names_in(ast.parse((ROOT / path).read_text(encoding="utf-8")))
            assert function in known, f"{name} names {path}:{function}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_to_a_file_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", DOCUMENTS[name]):
        if "://" not in target:
            assert ((ROOT / name).parent / target).exists(), f"{name} links to {target}"


def test_the_changelog_has_a_section_for_this_version() -> None:
    assert f"\n## {PROJECT['version']}" in DOCUMENTS["CHANGELOG.md"]


# ---- commands


def visible_flags(command: click.Command) -> set[str]:
    flags = {"--help"}
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            flags |= {*option.opts, *option.secondary_opts}
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            flags |= visible_flags(inner)
    return flags


def command_lines(text: str) -> Iterator[list[str]]:
    """Every call of one of our commands in fenced blocks and in `inline code`, as words."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    for line in lines:
        found = re.match(r"(?:\$ )?((?:potluck|potluck-broker|potluck-stage)(?: .*)?)$", line.strip())
        if found:
            yield shlex.split(found[1], comments=True)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_line_in_a_document_uses_flags_that_exist(name: str) -> None:
    for words in command_lines(DOCUMENTS[name]):
        command, rest = COMMANDS[words[0]], words[1:]
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            assert rest[0] in command.commands, f"{' '.join(words)}: there is no {rest[0]}"
            command, rest = command.commands[rest[0]], rest[1:]
        flags = visible_flags(command)
        unknown = [word for word in rest if word.startswith("-") and word != "-" and word not in flags]
        assert not unknown, f"{' '.join(words)}: {unknown}"


def test_every_flag_that_the_readme_mentions_belongs_to_a_command() -> None:
    known = set().union(*map(visible_flags, COMMANDS.values()))
    prose = re.sub(r"^```\w*\n.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose)) <= known


def test_every_exit_code_stands_in_the_readme() -> None:
    codes = {0, *(kind.exit_code for kind in errors._BY_CODE.values())}
    assert codes <= {int(row[0]) for row in rows(section(README, "Exit codes")) if row[0].isdigit()}


# ---- settings


def leaves(kind: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from leaves(field.type, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def keys_of(raw: dict[str, Any]) -> Iterator[str]:
    for key, value in raw.items():
        if isinstance(value, dict) and key != "layer_assignment":
            yield from (f"{key}.{inner}" for inner in value)
        else:
            yield key


def nested(path: str, value: object) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


def has_effect(path: str) -> bool:
    """Whether a value under this key becomes a command's default."""
    with_file = {"logging": {"file": "potluck.log"}}  # sizes of a log count only where there is one
    for probe in ("/x", "f16", "debug", 7, 0.5, True, False, ["x"], {"x": [0, 1]}):
        raw = nested(path, probe)
        raw = {**with_file, **raw, "logging": {**with_file["logging"], **raw.get("logging", {})}}
        try:
            changed = parse_settings(raw, "probe")
        except errors.SettingsError:
            continue
        if defaults_for(changed) != defaults_for(parse_settings(with_file, "probe")):
            return True
    return False


def test_the_settings_file_has_every_key_and_no_other() -> None:
    raw = yaml.safe_load(SETTINGS_FILE.read_text(encoding="utf-8"))
    assert sorted(keys_of(raw)) == sorted(leaves(Settings))


def test_the_settings_file_changes_nothing() -> None:
    given = defaults_for(load_settings(SETTINGS_FILE))
    real: dict[str, object] = {}
    for command in COMMANDS.values():
        real |= {option.name or "": option.default for option in command.params}
    assert given == {key: real[key] for key in given}
    plain, named = msgspec.to_builtins(Settings()), msgspec.to_builtins(load_settings(SETTINGS_FILE))
    for path in leaves(Settings):
        if not has_effect(path):
            part, _, key = path.rpartition(".")
            assert (named[part] if part else named)[key] == (plain[part] if part else plain)[key], path


def test_the_settings_file_explains_every_key_and_says_which_have_no_effect_yet() -> None:
    text = SETTINGS_FILE.read_text(encoding="utf-8")
    for path in leaves(Settings):
        part, _, key = path.rpartition(".")
        body = re.split(rf"^{part}:$", text, maxsplit=1, flags=re.MULTILINE)[1] if part else text
        found = re.search(rf"((?:^ *#.*\n)+)^ *{key}:", body, re.MULTILINE)
        assert found is not None, f"{path} has no comment above it"
        idle = "No effect yet" in found[1]
        assert idle == (not has_effect(path)), (
            f"{path}: {'it has an effect' if idle else 'say: No effect yet'}"
        )


SAMPLES = [path for path in sorted((ROOT / "configs").glob("**/*.yaml")) if path.parent.name != "clusters"]


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_every_sample_of_settings_loads(path: Path) -> None:
    load_settings(path)
