# Two commands set up a fresh machine: `make demo` and `make test`. Python 3.11 or newer, gcc and make are enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
# Many tests wait for real processes: two at a time take little more than half the time of one.
JOBS   ?= 2
# Tests start hundreds of processes, each of which would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo up test lint check lock clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY) ## make .venv and install the locked dependencies

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headwater needs Python 3.11 or newer: make PYTHON=python3.11 install")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(READY) ## import MovieLens-100K, learn from it through the real pipeline, show what it does
	$(BIN)/headwater demo

up: $(READY) ## start every process and keep running
	$(BIN)/headwater up

test: $(READY) ## run the whole test suite, JOBS=2 modules at a time
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lint: $(READY) ## ruff, mypy --strict and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(JOBS)
	$(BIN)/lint-imports

check: lint test ## all that CI runs

lock: ## write requirements.lock anew from pyproject.toml, in a clean environment
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet torch==2.13.0
	build/lock/bin/python -m pip install --quiet 'setuptools>=77' '.[stack,datasets,privacy,vertical,dev]'
	build/lock/bin/python -m pip freeze --all --exclude headwater --exclude pip | sed 's/+cpu//' > requirements.lock
	rm -rf build/lock

clean: ## remove the environment and every cache (not your data)
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
