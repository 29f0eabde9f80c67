# Everything sets itself up: each target creates the virtual environment and installs when missing.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.PHONY: swarm test check fmt proto bench parity compose-test clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

swarm: $(READY)  ## train on four local worker processes and report
	$(BIN)/murmur swarm $(ARGS)

test: $(READY)  ## every gating test
	$(BIN)/pytest -n 2 --dist loadscope tests/unit tests/protocol
	$(BIN)/pytest tests/integration

check: $(READY)  ## format, lint, types, import rules, proto freshness
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python protos/generate.py --check

fmt: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(READY)  ## regenerate the gRPC code
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python protos/generate.py

clean:
	rm -rf $(VENV) *.egg-info runs
