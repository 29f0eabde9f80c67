# Every target sets up what it needs: the virtual environment is made and filled when missing.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PRODUCT := $(VENV)/.product
INSTALL ?= $(BIN)/pip install --no-compile
# pip's own words about another Python name a library, and the environment would stay.
MADE := test -x $(BIN)/python || { $(PYTHON) -c 'import sys; here = sys.version_info[:2]; sys.exit(not (3, 11) <= here < (3, 15) \
	and "$(PYTHON) is Python %d.%d, and 3.11 to 3.14 are needed: say PYTHON=python3.11" % here)' && $(PYTHON) -m venv $(VENV); }
ARGS ?=
RUN := PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=. python
LAB := $(RUN) -m tests.lab
# The path below murmuration/ is given: the generated code imports what it names.
PROTOC := $(RUN) -m grpc_tools.protoc -I. murmuration/protos/murmuration.proto
PROTO_KINDS := python grpc_python mypy mypy_grpc
# Two processes of quick tests: more would only wait for each other on a small machine. Tests of real
# processes wait for these most of the time, so that twice as many go on at once; those of a file share
# its swarms, which train for as long as they are there.
TEST_PROCESSES ?= 2
WAITING_PROCESSES ?= 4
# A process that cannot keep what it compiles compiles all of the product and of the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install swarm check test size fmt proto coverage bench parity same-bits gpu hostile lab-smoke clean

install: $(READY)  ## the virtual environment with everything in it, and nothing else

help:  ## what there is; `python -m tests.lab` lists what measures us
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

$(READY): pyproject.toml constraints.txt
	@$(MADE)
	$(INSTALL) --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(PRODUCT): pyproject.toml constraints.txt
	@$(MADE)
	$(INSTALL) --quiet --constraint constraints.txt --editable .
	touch $@

# Without what tests need, unless that is there.
swarm: $(or $(wildcard $(READY)),$(PRODUCT))  ## train on four local worker processes and report; ARGS="--steps 300 ..."
	$(BIN)/murmur swarm $(ARGS)

# `make check test` runs what both need once.
check: $(READY)  ## format, lint, types, import rules, freshness of the generated code, quick tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	out=$$(mktemp -d); trap 'rm -r $$out' EXIT; $(PROTOC) $(PROTO_KINDS:%=--%_out=$$out) 2>/dev/null || exit 1; \
	! diff -q $$out/murmuration/protos protos | grep _pb2 || { echo "run: make proto"; exit 1; }
	$(RUN) -m tests.size
	$(BIN)/pytest -n $(TEST_PROCESSES) tests/unit tests/protocol

test: check  ## everything that gates: `check`, then tests with real processes
	$(BIN)/pytest -n $(WAITING_PROCESSES) --dist loadfile tests/integration

size: $(READY)  ## files and lines by package, beside their budget
	$(RUN) -m tests.size

coverage: $(READY)  ## branch coverage of the product by the quick tests
	$(BIN)/pytest -n $(TEST_PROCESSES) tests/unit tests/protocol --cov=murmuration --cov=algorithms --cov=worker --cov=coordinator --cov=protos --cov-branch --cov-report=term

fmt: $(READY)  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(READY)  ## regenerate the gRPC code
	$(PROTOC) $(PROTO_KINDS:%=--%_out=.) 2>/dev/null

bench: $(READY)  ## all presets, PyTorch's DDP, torchft and hivemind on 2 to 1000 Mbit/s: the README's tables
	$(LAB) bench $(ARGS)

parity: $(READY)  ## real workers against the one-process reference, bit for bit
	$(BIN)/pytest tests/integration/test_parity.py $(ARGS)

same-bits: $(READY)  ## what small fixed runs end with, hashed: compare two commits
	$(LAB) same-bits

gpu: $(READY)  ## ten minutes on a card: whether all works there, and how fast; ARGS="--only swarm"
	$(LAB) gpu $(ARGS)

hostile: $(READY)  ## attacks on real workers, from outside and by a member: half an hour; ARGS="--only late"
	$(LAB) hostile $(ARGS)

lab-smoke: $(READY)  ## each experiment of `python -m tests.lab`, as small as it goes (once a week); ARGS="NAME ..."
	$(LAB) smoke $(ARGS)

# Other systems need other libraries: an environment of their own, with a .gitignore of its own.
.venv-peers/.ready: tests/lab/peers/requirements.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	echo '*' > .venv-peers/.gitignore
	.venv-peers/bin/pip install --quiet --requirement $<
	touch $@

clean:  ## remove the virtual environment and the runs
	rm -rf $(VENV) *.egg-info runs
