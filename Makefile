# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv and installs into it.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
# One pytest worker a core, capped: each compiles graphs and kernels of its own.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))

# OpenMP threads that spin while they wait are 3 to 6 times slower on a machine with other work.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-gpu lint format type bench report clean

demo: $(VENV)/.installed
	$(BIN)/sage-cute train

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n $(WORKERS) tests

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m gpu tests

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Type checkers cannot follow an editable install through the package map: check what a wheel holds.
type: $(VENV)/.installed
	rm -rf .mypy_site build
	$(BIN)/pip install -q --no-deps --target .mypy_site .
	MYPYPATH=.mypy_site $(BIN)/mypy -p sage_cute

bench: $(VENV)/.installed
	$(BIN)/python -m bench.dispatch
	$(BIN)/python -m bench.accuracy

# The tables of README.md and docs/evidence.md, from the result files in bench/results.
report: $(VENV)/.installed
	$(BIN)/python -m bench.readme

# torch first and by its own pin: a range would let pip take a CUDA build of several GB.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_site build *.egg-info
