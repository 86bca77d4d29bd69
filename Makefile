# Everything works on a machine that has Python >= 3.12 and reaches PyPI, and nothing else.
# An environment is installed again only when pyproject.toml has changed, or the accelerator that its jax is for.

SHELL := /bin/bash
PORT ?= 8000
comma := ,
PIP := -m pip install --disable-pip-version-check --progress-bar off --no-compile
# On all cores, unlike pip; a package may have files that no Python can compile.
COMPILE := -m compileall -q -j 0 -x "/(tests|transformers/models)/"

# What `make install` has found last: cpu, cuda12, cuda13 or tpu; and the packages that make jax use another one.
EXTRA = $(shell cat .venv/.accelerator)
# Tests run in three processes, a file in one of them: some wait for processes of their own, so more than two cores'.
WORKERS := -n 3 --dist loadfile
# Their many processes compile the same sources once.
unexport PYTHONDONTWRITEBYTECODE
# The programs of tests take longer to compile than to run. `make test-full` compiles them as a server does.
UNOPTIMIZED := XLA_FLAGS=--xla_backend_optimization_level=0
# Whether cases that were proved for the same input are left out, and those that pass are noted: write, read or ignore.
PROVED ?= write
# Which fourteenth of what `make test` leaves out `make test-part` runs: a number, or that of the day.
PART ?= today
# The built-in models that tests use.
TEST_MODELS := smollm2-135m-instruct all-minilm-l6-v2

PLUGINS := jax-cuda12-plugin jax-cuda12-pjrt jax-cuda13-plugin jax-cuda13-pjrt libtpu
OTHER_PLUGINS = $(foreach name,$(PLUGINS),$(if $(findstring $(EXTRA),$(name)),,$(name)))

# The oldest jax that pyproject.toml admits, which GPU machines may have.
OLDEST := $(shell sed -n 's/^ *"jax>=\([0-9.]*\),.*/\1/p' pyproject.toml)

.PHONY: help install run test test-full test-part test-aot test-oldest check bench look
look:

help:
	@echo 'make install    .venv with jaxserve in it, and the jax for the GPU or TPU it finds (PYTHON=/path/to/python3.12'
	@echo '                to choose one, ACCELERATOR=cpu, cuda12, cuda13 or tpu to choose what jax is for)'
	@echo 'make run        install, fetch the default model, serve it on port $(PORT) (PORT=), show an answer'
	@echo 'make test       15 minutes in a fresh clone on two 2.4 GHz vCPUs, 21 if no case is proved: every promise,'
	@echo '                on the corners of the large tables'
	@echo 'make test-aot   1 minute if all cases are proved, 2 to 5 if few programs are new, 10 if all are, 4 more to install:'
	@echo '                compile for GPUs and TPUs that are not here, in .venv-aot (5 GB, if it has to be installed)'
	@echo 'make test-part  a fourteenth of what these leave out, another one each day (PART=)'
	@echo 'make test-oldest  with jax $(OLDEST): compiles for GPUs, interpreted kernels, quick tests (another 5 GB)'
	@echo 'make test-full  hours: all of both, whole tables, long budgets, every mesh shape'
	@echo 'make check      about 5 minutes: lint, types and the quick tests (scripts/check)'
	@echo 'make bench      measure the server on this machine'

install: .venv/.installed

run: .venv/.installed
	@.venv/bin/jaxserve pull
	@.venv/bin/python scripts/run --port $(PORT)

test: .venv/.installed-dev
	@.venv/bin/jaxserve pull $(TEST_MODELS)
	$(UNOPTIMIZED) .venv/bin/pytest $(WORKERS) --proved=$(PROVED) -m 'not aot and not grid' --ignore=tests/aot

# Nothing is installed if all cases are proved for what would be.
test-aot:
	@scripts/make-venv .venv-aot
	@if [ $(PROVED) = ignore ] || ! .venv-aot/bin/python -m tests.proved.table tests/aot test cuda13 tpu; then \
	    $(MAKE) --no-print-directory test-aot-here; fi

test-aot-here: .venv-aot/.installed
	JAX_PLATFORMS=cpu .venv-aot/bin/python -m pytest -n 2 --proved=$(PROVED) -m 'aot and not grid' tests/aot

# Before a commit that changes device code.
test-oldest: .venv-oldest/.installed
	JAX_PLATFORMS=cpu .venv-oldest/bin/python -m pytest -n 2 -m 'aot and not grid' tests/aot -k 'not tpu and not v6e'
	JAX_PLATFORMS=cpu .venv-oldest/bin/python -m pytest -n 2 --dist loadfile -m 'not grid and not aot' tests/pallas_kernels
	JAX_PLATFORMS=cpu .venv-oldest/bin/python -m pytest -n 2 --dist loadfile --quick tests/layers tests/models tests/runtime
	JAX_PLATFORMS=cpu .venv-oldest/bin/python -m pytest -n 2 --dist loadfile -m 'interpreted and not grid' \
	    tests/layers tests/models tests/runtime

test-full: .venv/.installed-dev .venv-aot/.installed
	@.venv/bin/jaxserve pull $(TEST_MODELS)
	JAXSERVE_TESTS=full .venv/bin/pytest $(WORKERS) -m 'not aot'
	JAX_PLATFORMS=cpu .venv-aot/bin/python -m pytest -n 2 -m aot tests/aot

# Another fourteenth of the cases each day, so that all of them are seen within two weeks.
test-part: .venv/.installed-dev .venv-aot/.installed
	@.venv/bin/jaxserve pull $(TEST_MODELS)
	JAXSERVE_TESTS=full $(UNOPTIMIZED) .venv/bin/pytest $(WORKERS) --part=$(PART) -m 'grid and not aot' --ignore=tests/aot
	JAX_PLATFORMS=cpu .venv-aot/bin/python -m pytest -n 2 --part=$(PART) -m 'grid and aot' tests/aot

check: .venv/.installed-dev
	scripts/check

bench: .venv/.installed
	.venv/bin/python benchmarks/serving_cpu.py

# Install the project with the extras that it is called with.
define INSTALL
	@scripts/make-venv .venv
	@.venv/bin/python -m pip uninstall -qq -y $(OTHER_PLUGINS)
	.venv/bin/python $(PIP) -q -e '.[$(1)]'
	@.venv/bin/python $(COMPILE) .venv/lib >/dev/null 2>&1 || true
endef

.venv/.installed: pyproject.toml scripts/make-venv .venv/.accelerator
	$(call INSTALL,$(EXTRA))
	@touch $@

# Once, and whenever somebody asks; the file changes only with the choice.
.venv/.accelerator: $(if $(filter install,$(MAKECMDGOALS))$(ACCELERATOR),look)
	@scripts/make-venv .venv
	@.venv/bin/python -m jaxserve.accelerators $@

.venv/.installed-dev: pyproject.toml scripts/make-venv .venv/.accelerator
	$(call INSTALL,$(EXTRA)$(comma)dev)
	@touch .venv/.installed $@

.venv-aot/.installed: pyproject.toml scripts/make-venv
	@scripts/make-venv .venv-aot
	.venv-aot/bin/python $(PIP) -q -e '.[test,cuda13,tpu]'
	@.venv-aot/bin/python $(COMPILE) .venv-aot/lib >/dev/null 2>&1 || true
	@touch $@

.venv-oldest/.installed: pyproject.toml scripts/make-venv
	@scripts/make-venv .venv-oldest
	.venv-oldest/bin/python $(PIP) -q -e '.[test,cuda13]' jax==$(OLDEST) jaxlib==$(OLDEST)
	@.venv-oldest/bin/python $(COMPILE) .venv-oldest/lib >/dev/null 2>&1 || true
	@touch $@
