# Every target sets up what it needs: the virtual environment is made and filled when missing.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
RUN := PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=. python
# Two processes of quick tests: more would only wait for each other on a small machine. Tests of real
# processes wait for these most of the time, so that twice as many go on at once; those of a file share
# its swarms, which train for as long as they are there.
TEST_PROCESSES ?= 2
WAITING_PROCESSES ?= 4
# A process that cannot keep what it compiles compiles all of the product and of the tests again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install swarm test check lint size quick-test coverage fmt proto bench exchange tls codecs parity baselines losses frontier time-to-loss kseed optimizers traffic goodput plan-table sync-time unequal pair-faults keep-faults overlap pair-latency stability schedules simulate skippipe-routes skippipe-deadlock skippipe-omission schedule stage-times stage-kills stage-memory stage-losses stage-parity same-bits samples memory bench-peers detection hostile connections one-hostile admission nat fuzz kill-loop broken locate page-shots observing-cost thousand compose-test swarm-stack-test slurm-test clean

install: $(READY)  ## the virtual environment with everything in it, and nothing else

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

swarm: $(READY)  ## train on four local worker processes and report; ARGS="--steps 300 ..."
	$(BIN)/murmur swarm $(ARGS)

# `make check test` runs what both need once.
check: lint quick-test  ## format, lint, types, import rules, freshness of the generated code, quick tests

test: quick-test  ## all tests that gate
	$(BIN)/pytest -n $(WAITING_PROCESSES) --dist loadfile tests/integration

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(RUN) protos/generate.py --check
	$(RUN) -m tests.size

quick-test: $(READY)
	$(BIN)/pytest -n $(TEST_PROCESSES) tests/unit tests/protocol

size: $(READY)  ## files and lines by package, beside their budget
	$(RUN) -m tests.size

coverage: $(READY)  ## branch coverage of the product by the quick tests
	$(BIN)/pytest -n $(TEST_PROCESSES) tests/unit tests/protocol --cov=algorithms --cov=worker --cov=coordinator --cov=protos --cov-branch --cov-report=term

fmt: $(READY)  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(READY)  ## regenerate the gRPC code
	$(RUN) protos/generate.py

bench: $(READY)  ## all presets, PyTorch's DDP, torchft and hivemind on 2 to 1000 Mbit/s: the README's tables
	$(RUN) -m tests.lab.compare.command $(ARGS)

exchange: $(READY)  ## exchange on loopback, and the I/O loop's lag while training
	$(RUN) tests/lab/exchange.py $(ARGS)
	$(RUN) tests/lab/lag.py

tls: $(READY)  ## mutual TLS beside plain: exchange on loopback, then rounds on 20 and 100 Mbit/s (root)
	$(RUN) tests/lab/exchange.py --tls 4 $(ARGS)
	$(RUN) tests/lab/sync_time.py --tls 20 100

codecs: $(READY)  ## codec throughput on one core, and whether it is what is asked
	$(RUN) tests/lab/codecs.py $(ARGS)

parity: $(READY)  ## four real workers against the one-process reference, on the default model
	$(RUN) tests/lab/parity.py $(ARGS)

baselines: $(READY)  ## diloco, ddp and local at equal tokens: the README's table
	$(RUN) tests/lab/baselines.py $(ARGS)

losses: $(READY)  ## what bits and overlap cost in loss, at equal tokens
	$(RUN) tests/lab/losses.py $(ARGS)

frontier: $(READY)  ## bytes against loss, each preset tuned, in one process a plan; resumable: runs/frontier.png
	$(RUN) tests/lab/frontier.py --picture runs/frontier.png $(ARGS)

time-to-loss: $(READY) .venv-peers/.ready  ## seconds to DDP's loss on 2 to 1000 Mbit/s, each system; over an hour, resumable (root): runs/time_to_loss.png
	$(RUN) tests/lab/time_to_loss.py --picture runs/time_to_loss.png $(ARGS)

kseed: $(READY)  ## fine-tuning by seeds and scalars beside backpropagation: accuracy, bytes of a round
	$(RUN) tests/lab/kseed.py $(ARGS)

optimizers: $(READY)  ## Muon beside AdamW, alone, in ddp and in diloco, learning rates tuned
	$(RUN) tests/lab/optimizers.py $(ARGS)

traffic: $(READY)  ## bytes per worker and round for 2 to 5 workers, against the kernel's count
	$(RUN) tests/lab/traffic.py $(ARGS)

goodput: $(READY)  ## exchange over links of 20 and 100 Mbit/s, beside iperf3 (root)
	$(RUN) tests/lab/goodput.py $(ARGS)

plan-table: $(READY)  ## link speeds that the paper tells for each method, beside our simulator's
	$(RUN) tests/lab/plan_table.py

sync-time: $(READY)  ## a round of noloco and of diloco for 2, 4 and 8 peers on 20 Mbit/s (root)
	$(RUN) tests/lab/sync_time.py $(ARGS)

unequal: $(READY)  ## one worker five times slower than the others
	$(RUN) tests/lab/unequal.py $(ARGS)

pair-faults: $(READY)  ## a worker killed, stopped for 60 s, cut off during a round in pairs: rounds and losses
	$(RUN) tests/lab/pair_faults.py $(ARGS)

keep-faults: $(READY)  ## a worker killed, resumed, cut off, late where replicas keep what they have not sent: losses
	$(RUN) tests/lab/keep_faults.py $(ARGS)

overlap: $(READY)  ## speed beside local while rounds are on their way, one worker half as fast too: five runs each
	$(RUN) tests/lab/overlap.py $(ARGS)

pair-latency: $(READY)  ## NoLoCo's latency model beside figures derived from it
	$(RUN) tests/lab/pair_latency.py $(ARGS)

stability: $(READY)  ## NoLoCo's stability check beside 64 simulated replicas: docs/evidence/stability.png
	$(RUN) tests/lab/stability.py $(ARGS)

simulate: $(READY)  ## noloco to 4,096 peers on a virtual clock: docs/evidence/simulate.png
	$(BIN)/murmur simulate --peers 4,64,1024,4096 --params 1000 --link 100mbit,delay=50ms --latency-spread 1 --plot docs/evidence/simulate.png $(ARGS)

schedules: $(READY)  ## 100,000 random schedules of faults for rounds in pairs, and as many for means
	$(RUN) tests/lab/pair_schedules.py --processes 2 $(ARGS)
	$(RUN) tests/lab/mean_schedules.py $(ARGS)
	$(RUN) tests/lab/mean_schedules.py --shuffled $(ARGS)
	$(RUN) tests/lab/mean_schedules.py --keep $(ARGS)

skippipe-routes: $(READY)  ## SkipPipe's routes in the event simulator, and the search's speed
	$(RUN) tests/lab/skippipe_routes.py $(ARGS)

skippipe-deadlock: $(READY)  ## 10,000 random schedules at memory 1 to 3: none may deadlock
	$(RUN) tests/lab/skippipe_deadlock.py $(ARGS)

skippipe-omission: $(READY)  ## perplexity without some stages, trained full and with skips (long)
	$(RUN) tests/lab/skippipe_omission.py $(ARGS)

schedule: $(READY)  ## a staged model's iterations with each routing, predicted and drawn: docs/evidence/schedule.png
	$(BIN)/murmur plan --stages 4 --microbatches 6 --forward-ms 100 --activation-bytes 98304 --link "5mbit,delay=100ms; 10mbit,delay=60ms; 20mbit,delay=30ms; 20mbit,delay=40ms; 50mbit,delay=10ms; 50mbit,delay=20ms; 100mbit,delay=5ms; 100mbit,delay=5ms" --plot docs/evidence/schedule.png

stage-times: $(READY)  ## iterations of 4 stages x 2 replicas on unequal links, beside their prediction (root)
	$(RUN) tests/lab/stage_times.py --plot docs/evidence/stages.png $(ARGS)

stage-kills: $(READY)  ## a replica of each of 4 stages killed during a call: iterations, and what became of microbatches
	$(RUN) tests/lab/stage_kills.py $(ARGS)

detection: $(READY)  ## how soon 100 simulated peers notice a crash; live peers that are declared dead (long)
	$(RUN) tests/lab/detection.py $(ARGS)

hostile: $(READY)  ## a stranger, then a member attacks an encrypted run: what happens, memory, rounds; ARGS=--insecure
	$(RUN) tests/lab/hostile.py $(ARGS)

connections: $(READY)  ## TLS connections that come and go by the thousand, twenty times: does the server live?
	$(RUN) tests/lab/connections.py $(ARGS)

thousand: $(READY)  ## a thousand simulated peers: bytes a second each, and what is left when half are killed (an hour)
	$(RUN) tests/lab/thousand.py $(ARGS)

stage-memory: $(READY)  ## memory of a stage's peer, against the whole model in one process
	$(RUN) tests/lab/stage_memory.py $(ARGS)

stage-losses: $(READY)  ## what cutting a model into 4 stages x 2 replicas costs in loss, at equal tokens
	$(RUN) tests/lab/stage_losses.py $(ARGS)

same-bits: $(READY)  ## what small fixed runs end with, hashed: compare two commits
	$(RUN) tests/lab/same_bits.py

samples: $(READY)  ## samples of an epoch drawn never, once, twice, under joins, a leave and kills
	$(RUN) tests/lab/samples.py $(ARGS)

stage-parity: $(READY)  ## real workers in 4 stages against one process that trains the whole model
	$(RUN) tests/lab/stage_parity.py $(ARGS)

memory: $(READY)  ## memory beyond a plain training process, as multiples of the model
	$(RUN) tests/lab/memory.py $(ARGS)

# Other systems need other libraries: an environment of their own, with a .gitignore of its own.
.venv-peers/.ready: tests/lab/peers/requirements.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	echo '*' > .venv-peers/.gitignore
	.venv-peers/bin/pip install --quiet --requirement $<
	touch $@

bench-peers: $(READY) .venv-peers/.ready  ## torchft and hivemind on our task; ARGS="--mbps 20 ..."
	$(RUN) tests/lab/peers/run.py torchft $(ARGS)
	$(RUN) tests/lab/peers/run.py hivemind $(ARGS)

one-hostile: $(READY)  ## one of eight workers lies in what it contributes: the final loss beside an honest run's
	$(RUN) tests/lab/one_hostile.py $(ARGS)

admission: $(READY)  ## five hosts in network namespaces let each other in by token, and nobody else
	$(RUN) tests/lab/admission.py

nat: $(READY)  ## five hosts, two behind NAT and one with a wrong address: gaps, loss, bytes relayed, a relay's end (root, nftables)
	$(RUN) tests/lab/nat.py $(ARGS)

fuzz: $(READY)  ## spoiled messages to live nodes and to every reader: executions, crashes, memory; ARGS="--seconds 600"
	$(RUN) tests/lab/fuzz.py $(ARGS)

locate: $(READY)  ## a slow uplink, downlink, link, machine and disk, and ten undisturbed minutes: verdicts (root)
	$(RUN) tests/lab/locate.py $(ARGS)

page-shots: $(READY)  ## pictures of the page and of status --watch: eight peers, one dead, one slow (root, Chromium)
	$(RUN) tests/lab/page_shots.py $(ARGS)

observing-cost: $(READY)  ## utilization with metrics, page, clients and encryption on, against all off, in turns
	$(RUN) tests/lab/observing_cost.py $(ARGS)

kill-loop: $(READY)  ## a worker is killed every 20 s and started by the same line: steps lost, exit codes
	$(RUN) tests/lab/kill_loop.py $(ARGS)

broken: $(READY)  ## fifteen set-ups that cannot work: what join and doctor say, and how soon (root)
	$(RUN) tests/lab/broken_setups.py $(ARGS)

compose-test:  ## the container swarm on a real engine, one worker killed on the way
	deploy/compose-test $(ARGS)

swarm-stack-test:  ## the same as a stack on a real Docker Swarm of one node, one task killed on the way
	deploy/swarm-stack-test $(ARGS)

slurm-test: $(READY)  ## the array job on a real Slurm of one node, a task requeued on the way (root)
	PATH="$(abspath $(BIN)):$$PATH" deploy/slurm-test $(ARGS)

clean:  ## remove the virtual environment and the runs
	rm -rf $(VENV) *.egg-info runs
