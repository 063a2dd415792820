# Every target sets up what it needs in .venv; Python 3.11 or 3.12 is all a machine must have.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
TORCH  := $(shell grep '^torch==' constraints.txt)

# torchtitan without what its trainer needs (datasets, wandb, ...): our tests use its configuration and modules only
TITAN  := torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.16 docstring-parser==0.18.0 typeguard==4.6.0

# packages that single tests meet, installed aside (see tests/others.py); without them those tests are skipped and say so
OTHERS := bitsandbytes==0.50.2 torchao==0.18.0 deepspeed==0.19.8 einops==0.8.2 hjson==3.1.0 msgpack==1.2.4 ninja==1.13.2 py-cpuinfo==9.0.0

JOBS   ?= 4

.PHONY: help setup test demo docs lint format test-gpu bench bench-gpu clean

help:
	@echo "make demo      compare four recipes on a small GPT, on this machine's CPU, and write a report (under five minutes)"
	@echo "make test      run the tests (CPU)"
	@echo "make lint      ruff and pyrefly"
	@echo "make docs      build the documentation into docs/_build, warnings as errors"
	@echo "make test-gpu  run the tests that need a CUDA GPU, with the Python in PATH, in JOBS=4 processes"
	@echo "make bench     measure what each recipe costs in emulation, on this CPU"
	@echo "make bench-gpu measure kernels, products, layers and steps on this GPU, and write the README's tables"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip --disable-pip-version-check install --quiet --upgrade "pip>=25.1"
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[workbench,onnx,lightning]" --group test --group lint --group docs
	$(PIP) --no-deps $(TITAN)
	touch $@

$(VENV)/others/.ready: $(VENV)/.ready
	DS_BUILD_OPS=0 $(PIP) --no-deps --no-build-isolation --upgrade --target $(VENV)/others $(OTHERS) && touch $@ || echo "not installed: $(OTHERS)"

test: setup $(VENV)/others/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

demo: setup
	$(BIN)/python -m nmsparse compare --seeds 3 --steps 150

docs: setup
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The GPU machine brings its own torch: use the Python in PATH, not the virtual environment.
test-gpu:
	PYTHONPATH=src:tests $(PYTHON) tests/gpu/parallel.py $(JOBS)

bench-gpu:
	PYTHONPATH=src $(PYTHON) -m nmsparse bench --output benchmarks/results/bench.jsonl
	PYTHONPATH=src $(PYTHON) -m nmsparse bench --inference --output benchmarks/results/bench.jsonl
	PYTHONPATH=src $(PYTHON) benchmarks/overhead.py --device cuda
	$(PYTHON) benchmarks/table.py --write

bench: setup
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis docs/_build
