# make demo     train the digits net on one replica and on two, compare, plot: demo-results
# make test     lint and the test suite, on all three backends (SLOW=1: with the longest tests)
# make lint     the quick checks alone
# make gpu-rehearsal   steps compiled for GPUs that are not there: the tables of docs/gpu.md
# make trainer-tests   Keras' own trainer tests, as they are and on two replicas: half an hour
# make format   apply the formatter and the safe fixes
# make clean    remove environments, caches and outputs
#
# Needs Python 3.11 or newer with venv. Each environment is made on first use and installed again
# only when pyproject.toml or constraints-test.txt changed.

PYTHON ?= python3
PYTEST_ARGS ?=
SLOW ?=
BACKENDS ?= jax tensorflow torch

# DEMO_BACKEND=jax|tensorflow|torch; DEMO_ARGS goes to the program, e.g. DEMO_ARGS="--epochs 5"
DEMO_BACKEND ?= jax
DEMO_OUTPUT ?= demo-results
DEMO_REPLICAS ?= 2
DEMO_ARGS ?=

HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
DEMO_JAX ?= $(if $(HAS_GPU),jax[cuda12],jax)
DEMO_TENSORFLOW ?= $(if $(HAS_GPU),tensorflow[and-cuda],tensorflow)
DEMO_TORCH ?= torch
DEMO_PACKAGE = $(DEMO_$(shell echo $(DEMO_BACKEND) | tr a-z A-Z))

DEMO_VENV := .venv-demo
TEST_VENV := .venv-test
DEMO_STAMP = $(DEMO_VENV)/.installed-$(DEMO_BACKEND)
GPU_PLUGIN := $(TEST_VENV)/gpu-plugin
GPU_STAMP := $(TEST_VENV)/.installed-gpu-plugin
LINT_STAMP := $(TEST_VENV)/.installed-lint
TEST_STAMP := $(TEST_VENV)/.installed-test
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints-test.txt
REQUIREMENTS := pyproject.toml constraints-test.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-unit test-gpu exactness gpu-plugin gpu-rehearsal trainer-tests \
  $(BACKENDS:%=test-%) lint format clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(DEMO_STAMP)
	KERAS_BACKEND=$(DEMO_BACKEND) TF_CPP_MIN_LOG_LEVEL=2 \
	  $(DEMO_VENV)/bin/unisono train digits --replicas $(DEMO_REPLICAS) --compare \
	  --output $(DEMO_OUTPUT) $(DEMO_ARGS)
	@echo "All of it is in $(abspath $(DEMO_OUTPUT))"

# A process has one Keras backend, so tests/backend and tests/exactness run once for each of them, two at a
# time; -O keeps what they print apart. SLOW=1 adds the tests that are marked slow, as .ci/run does.
# COVERAGE=1 measures coverage, which takes half as long again. XLA need not optimize tiny nets.
COVERAGE ?=
COVER = $(if $(COVERAGE),--cov --cov-report=)
PYTEST = COVERAGE_FILE=.coverage.$@ TF_CPP_MIN_LOG_LEVEL=2 \
  XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" \
  $(TEST_VENV)/bin/python -m pytest $(COVER) -p no:cacheprovider $(if $(SLOW),,-m "not slow") \
  $(PYTEST_ARGS)

test: lint $(TEST_STAMP)
	@rm -f .coverage .coverage.*
	$(MAKE) --no-print-directory -k -j2 -O $(BACKENDS:%=test-%) test-unit test-gpu
	$(if $(COVERAGE),@$(TEST_VENV)/bin/coverage combine -q && $(TEST_VENV)/bin/coverage report)

test-unit: $(TEST_STAMP)
	$(PYTEST) tests/unit

$(BACKENDS:%=test-%): test-%: $(TEST_STAMP)
	KERAS_BACKEND=$* $(PYTEST) tests/backend tests/exactness

# The table of docs/exactness.md, measured anew: hours.
exactness: $(TEST_STAMP)
	cd tests && ../$(TEST_VENV)/bin/python -m exactness --write ../docs/exactness.md

# Needs no GPU. JAX's CUDA plugin compiles for one that is described to it; where it is not installed
# (`make gpu-plugin`), JAX's part is skipped.
test-gpu: $(TEST_STAMP)
	KERAS_BACKEND=torch PYTHONPATH=$(abspath $(GPU_PLUGIN)) $(PYTEST) tests/gpu

gpu-rehearsal: $(GPU_STAMP) $(TEST_STAMP)
	cd tests && TF_CPP_MIN_LOG_LEVEL=3 PYTHONPATH=$(abspath $(GPU_PLUGIN)) \
	  ../$(TEST_VENV)/bin/python -m gpu --write ../docs/gpu.md

gpu-plugin: $(GPU_STAMP)

# Each backend twice: a test that passes the first time and fails the second is one that replicas break.
TRAINER_TESTS = $$($(TEST_VENV)/bin/python -c "import keras; print(keras.__path__[0])")/src/trainers/trainer_test.py
trainer-tests: $(TEST_STAMP)
	@for backend in $(BACKENDS); do for replicas in 0 2; do \
	  KERAS_BACKEND=$$backend UNISONO_THROUGH=$$replicas PYTHONPATH=tests/support \
	  TF_CPP_MIN_LOG_LEVEL=2 $(TEST_VENV)/bin/python -m pytest -p through_parallel -p no:cacheprovider \
	  -q -W ignore -c pyproject.toml $(TRAINER_TESTS); done; done

lint: $(LINT_STAMP)
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/mypy
	$(TEST_VENV)/bin/lint-imports

format: $(LINT_STAMP)
	$(TEST_VENV)/bin/ruff check --fix .
	$(TEST_VENV)/bin/ruff format .

clean:
	rm -rf $(DEMO_VENV) $(TEST_VENV) demo-results build dist htmlcov .coverage .coverage.*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call make_venv,directory): an existing environment is kept and only brought up to date.
define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "unisono needs Python 3.11 or newer; $(PYTHON) is older or missing. Set PYTHON=..."; exit 1; }
@test -x $(1)/bin/pip || $(PYTHON) -m venv $(1) || \
  { rm -rf $(1); echo "$(PYTHON) -m venv failed. On Debian: apt-get install python3-venv"; exit 1; }
endef

$(DEMO_STAMP): $(REQUIREMENTS)
	@test -n "$(DEMO_PACKAGE)" || \
	  { echo "DEMO_BACKEND is '$(DEMO_BACKEND)'; choose jax, tensorflow or torch."; exit 1; }
	$(call make_venv,$(DEMO_VENV))
	$(DEMO_VENV)/bin/python $(INSTALL) "$(DEMO_PACKAGE)"
	$(DEMO_VENV)/bin/python $(INSTALL) -e ".[$(DEMO_BACKEND)]"
	@touch $@

$(LINT_STAMP): $(REQUIREMENTS)
	$(call make_venv,$(TEST_VENV))
	$(TEST_VENV)/bin/python $(INSTALL) -e ".[lint]"
	@touch $@

# Beside the environment and without CUDA's libraries: in it, every program would look for a GPU.
$(GPU_STAMP): $(TEST_STAMP)
	$(TEST_VENV)/bin/python $(INSTALL) --no-deps --target $(GPU_PLUGIN) --upgrade \
	  jax-cuda12-plugin jax-cuda12-pjrt
	@touch $@

# torch first and alone, so that the pinned version is settled before anything else asks for it.
$(TEST_STAMP): $(LINT_STAMP)
	$(TEST_VENV)/bin/python $(INSTALL) torch
	$(TEST_VENV)/bin/python $(INSTALL) -e ".[all,dev]"
	@touch $@
