# Targets a person remembers: run test check bench fuzz reference gpu clean.
# Everything is installed into .venv from the files of this tree; nothing outside it is touched.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
OUT ?= runs/first-retraction
SCENARIO ?= first-retraction
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup run test check bench fuzz reference gpu picture fast clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

setup: $(VENV)/.ready ## .venv with everything that the other targets need

$(VENV)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo 'Pagestorm needs Python 3.11 or newer with venv: install it, or say make PYTHON=...' >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch \
		|| echo 'torch could not be installed: the simulated pool works without it, the real one does not' >&2
	@$(BIN)/python -m compileall -q sim real || true
	@$(BIN)/python -c 'from pagestorm.compiled import main; raise SystemExit(main())' || true
	@touch $@

fast: setup ## compile the hot modules again after an edit
	$(BIN)/python -c 'from pagestorm.compiled import main; raise SystemExit(main())'

run: setup ## simulate a shipped scenario on sim,torch in lockstep into $(OUT)
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then \
		$(BIN)/pagestorm run $(SCENARIO) --pools sim,torch --out $(OUT); \
	else \
		echo 'torch is not installed, so this is the simulated pool alone; for both: $(BIN)/pip install torch'; \
		$(BIN)/pagestorm run $(SCENARIO) --pools sim --out $(OUT); \
	fi

test: setup ## the whole test suite
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

check: setup ## format, lint, strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy sim/pagestorm real/pagestorm_real

bench: setup ## timings, as ratios measured in one run
	$(BIN)/python -m bench

fuzz: setup ## the deep hunts: many more examples than the test suite runs
	PAGESTORM_FUZZ=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'fuzz or not fuzz' tests

reference: setup ## the engines' own environments, to compare with
	$(BIN)/python -m pagestorm_real.reference.environment build sglang vllm

gpu: setup ## checks on an NVIDIA GPU (says what it skips without one)
	$(BIN)/python -m pagestorm_real.gpu

picture: setup ## the README's picture
	$(BIN)/pagestorm run first-retraction --pools sim --quiet --out runs/picture
	cp runs/picture/plots/timeline.png docs/first-retraction.png

clean: ## remove what the targets made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist runs *.egg-info sim/*.egg-info sim/pagestorm/_compiled*
