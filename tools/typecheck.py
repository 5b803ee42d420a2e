"""mypy --strict over all of potluck, checked against an install: that is what others import.

The source folders can't be checked in place, because the folder x/ is the package potluck.x. So the project is
installed into build/types, and the paths in mypy's findings are turned back into those of the source files.
Arguments are handed on to mypy.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALLED = ROOT / "build" / "types"


def install() -> None:
    """Install the project, without what it needs, into INSTALLED."""
    shutil.rmtree(INSTALLED, ignore_errors=True)
    shutil.rmtree(
        ROOT / "build" / "lib", ignore_errors=True
    )  # setuptools packs what an older build left there.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--root-user-action=ignore", "--target", str(INSTALLED), str(ROOT)]
    subprocess.run(command, check=True)


def main() -> int:
    """Check the types; returns mypy's exit status."""
    INSTALLED.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "-p", "potluck", *sys.argv[1:]]
    with (INSTALLED.parent / "types.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install()
        # mypy runs inside the install: in ROOT it would take the source folders for packages of their own.
        ran = subprocess.run(command, cwd=INSTALLED, stdout=subprocess.PIPE, text=True, check=False)
    print(re.sub(r"^potluck/", "", ran.stdout, flags=re.MULTILINE), end="")
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
