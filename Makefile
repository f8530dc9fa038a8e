# Each target makes .venv and installs when needed; a second run skips that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test test-all fuzz nightly lint clean
help:
	@echo "make demo      run the main job on the bundled model (CPU, minutes)"
	@echo "make test      the test suite (2 cores, under 10 minutes)"
	@echo "make test-all  the slow tests too"
	@echo "make fuzz      12,000 broken recipes, checkpoints, data files and runs (SEED=0, minutes)"
	@echo "make nightly   all of them, from seeds that no run had before"
	@echo "make lint      ruff"

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	rm -rf demo-output  # of an earlier run
	$(BIN)/surgery demo --output demo-output

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not gpu'

SEED ?= 0
fuzz: $(VENV)/.installed
	$(BIN)/python tests/fuzz/fuzz.py --seed $(SEED)

nightly: $(VENV)/.installed
	SURGERY_TEST_SEED=fresh $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not gpu'

lint: $(VENV)/.installed
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) demo-output build *.egg-info
