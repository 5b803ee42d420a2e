# Two commands are enough: `make demo` and `make test`. Both set everything up first, in .venv.

# Python for .venv: the newest of these that is 3.11 or later and can make environments. Override it with PYTHON=.
PYTHON =
PYTHONS = python3.13 python3.12 python3.11 python3
USABLE = import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

BIN = .venv/bin
RUFF = $(BIN)/ruff
PYTEST = $(BIN)/pytest

.PHONY: help demo test check bench recovery sim-long kill-broker soak bootstrap lint format types clean

help:
	@echo 'make demo     set up, then run a small cluster on this machine and talk to it'
	@echo 'make test     set up, then run everything: lint, types and all tests'
	@echo 'make check    lint, types, and the tests that need neither network nor model (under 2 minutes)'
	@echo 'make soak     serve 2,000 short requests while devices come and go, and see what the processes hold'
	@echo 'make sim-long put whole clusters on virtual time through 100,000 random steps and faults'
	@echo 'make bench    measure tokens per second over two stages, each on its own core'
	@echo 'make recovery kill stages under load a hundred times and count lost tokens (about 10 minutes)'
	@echo 'make kill-broker kill the broker 20 times under load and look for lost jobs'
	@echo 'make format   let ruff format the code and sort its imports'
	@echo 'make clean    remove .venv and what builds leave behind (the compiled llama.cpp stays in the cache)'
	@echo
	@echo 'PYTHON=, CC=, CXX= and CMAKE_ARGS= choose what .venv is made with.'

demo: bootstrap
	@$(BIN)/potluck demo

bench: bootstrap
	@$(BIN)/potluck bench throughput

recovery: bootstrap
	@$(BIN)/potluck bench recovery

kill-broker: bootstrap
	@KILLS=20 $(PYTEST) tests/acceptance/test_killed_broker.py

# What is tried at random is the same each time, so that a run says something of the change alone.
# `make check` and `make sim-long` try something new each time; SEED= (empty) lets this do so, too.
SEED = 20261204
test: bootstrap
	@$(MAKE) --no-print-directory lint types
	@$(PYTEST) --hypothesis-profile=ci $(SEED:%=--hypothesis-seed=%) tests

check: bootstrap
	@$(MAKE) --no-print-directory lint types
	@$(PYTEST) --hypothesis-profile=quick $(wildcard tests/unit tests/sim)

SOAK =
soak: bootstrap
	@$(BIN)/python -P -m potluck.tools.soak $(SOAK)

SIM_STEPS = 100000
sim-long: bootstrap
	@SIM_STEPS=$(SIM_STEPS) $(PYTEST) --hypothesis-profile=ci tests/sim/test_walk.py

# Silent and quick when nothing changed.
bootstrap:
	@set -e; \
	for python in $(or $(PYTHON),$(PYTHONS)); do \
		if "$$python" -c '$(USABLE)' >/dev/null 2>&1; then \
			exec "$$python" -P tools/bootstrap.py; \
		fi; \
	done; \
	echo 'Potluck needs Python 3.11 or newer with venv; $(or $(PYTHON),$(PYTHONS)) will not do. Install one:' >&2; \
	echo '  Debian, Ubuntu    sudo apt install python3 python3-venv' >&2; \
	echo '  Fedora            sudo dnf install python3' >&2; \
	echo '  macOS             brew install python' >&2; \
	echo 'or name yours: make PYTHON=/path/to/python3' >&2; \
	exit 1

# Twice, because a shell file in broker/ or stage/ is free of the pure modules' bans, but not of the bare names'.
lint:
	@$(RUFF) format --check --quiet --output-format=concise . || { echo 'make format puts the format right.' >&2; exit 1; }
	@$(RUFF) check --quiet .
	@$(RUFF) check --quiet --config pyproject.toml --select TID251 broker stage
	@$(BIN)/lint-imports --no-logo

types:
	@$(BIN)/python -P tools/typecheck.py

format:
	@$(RUFF) check --quiet --select I --fix .
	@$(RUFF) format .

clean:
	rm -rf .venv .venv.lock build dist *.egg-info .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
