# make run PROMPT="..."   answer one prompt on the CPU device
# make test               lint, types and the tests that need no GPU
# make test-all           the slow ones too
# make clean              remove the virtual environment and every cache
#
# Both commands set up everything they need in .venv, once. `run` installs the light core only;
# the tests add torch and the CUDA compiler tools (no GPU needed).

PYTHON ?= python3
# Extra words for pip. On Linux without a GPU, point pip at PyTorch's CPU wheels here to keep the
# test install small.
PIP_ARGS ?=
RUN_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -qq $(PIP_ARGS)

# The prompt goes to the command through the environment, untouched by make and the shell.
ifneq ($(origin PROMPT),undefined)
export MEGADECODE_PROMPT := $(value PROMPT)
endif
unexport PROMPT

.PHONY: run test test-all lint format clean
.DEFAULT_GOAL := test

run: $(VENV)/installed-run
	@if [ -z "$${MEGADECODE_PROMPT+set}" ]; then \
	  echo 'say what to answer: make run PROMPT="Why is the sky blue?"' >&2; exit 2; fi
	@$(VENV)/bin/megadecode run $(RUN_ARGS) -- "$$MEGADECODE_PROMPT"

test: lint
	$(PY) -m pytest -m "not slow"

test-all: lint
	$(PY) -m pytest

lint: $(VENV)/installed-test
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

format: $(VENV)/installed-test
	$(PY) -m ruff check --fix
	$(PY) -m ruff format
	$(PY) -m experiments.links

$(PY):
	@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) not found; set PYTHON=' >&2; exit 2; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit( \
	  f"megadecode needs Python 3.11, 3.12 or 3.13; $(PYTHON) is {v[0]}.{v[1]}.\n" \
	  "Choose another with: make PYTHON=python3.12 ...")'
	@echo 'making the virtual environment $(VENV)'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed-run: pyproject.toml | $(PY)
	@echo 'installing megadecode'
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-test: pyproject.toml | $(PY)
	@echo 'installing megadecode and what its tests need'
	@$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/installed-run

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find megadecode host cute_kernels tests experiments -name __pycache__ -type d -prune -exec rm -rf {} +
