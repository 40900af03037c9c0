# Needs python3 (>= 3.11) with venv, make, and a C++ compiler. Everything else goes into .venv.
#   make demo    train a small GPT on two processes, on text that every machine has: about three minutes
#   make test    lint, types, tests
#   make lint    lint and types only
#   make format  let ruff format the sources
#   make clean   remove what the above made

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   ?=            # options of the demo: make demo DEMO="--resume"
RANKS  ?= 2#          processes of the demo
PYTEST ?=            # options of pytest:   make test PYTEST="-k capture -x"

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint format clean

demo: $(VENV)/demo.stamp
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train_gpt.py $(DEMO)

test: lint
	$(BIN)/python -m pytest $(PYTEST)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) build dist demo_output .pytest_cache .ruff_cache .mypy_cache
	find monoflow tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# One torch for every target, named exactly so that no later release is taken in its place.
$(VENV)/torch.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp
	$(BIN)/python -m pip install -e ".[demo]"
	touch $@

# The demo's packages too, since the lint checks the types of the examples.
$(VENV)/dev.stamp: $(VENV)/torch.stamp
	$(BIN)/python -m pip install -e ".[test,demo,dev]"
	touch $@
