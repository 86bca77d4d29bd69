# Everything works on a machine that has Python >= 3.12 and reaches PyPI, and nothing else.
# An environment is installed again only when pyproject.toml has changed, or the accelerator that its jax is for.

SHELL := /bin/bash
PORT ?= 8000
PIP := -m pip install --disable-pip-version-check --progress-bar off

# What `make install` has found last: cpu, cuda12, cuda13 or tpu; and the packages that make jax use another one.
EXTRA = $(shell cat .venv/.accelerator)
PLUGINS := jax-cuda12-plugin jax-cuda12-pjrt jax-cuda13-plugin jax-cuda13-pjrt libtpu
OTHER_PLUGINS = $(foreach name,$(PLUGINS),$(if $(findstring $(EXTRA),$(name)),,$(name)))

.PHONY: help install run test test-aot check bench look
look:

help:
	@echo 'make install    .venv with jaxserve in it, and the jax for the GPU or TPU it finds (PYTHON=/path/to/python3.12'
	@echo '                to choose one, ACCELERATOR=cpu, cuda12, cuda13 or tpu to choose what jax is for)'
	@echo 'make run        install, fetch the default model, serve it on port $(PORT) (PORT=), show an answer'
	@echo 'make test       the whole test suite'
	@echo 'make test-aot   compile for GPUs and TPUs that are not here, in .venv-aot (a download of about 5 GB)'
	@echo 'make check      lint, types and the quick tests (scripts/check)'
	@echo 'make bench      measure the server on this machine'

install: .venv/.installed

run: .venv/.installed
	@.venv/bin/jaxserve pull
	@.venv/bin/python scripts/run --port $(PORT)

test: .venv/.installed-dev
	@.venv/bin/jaxserve pull
	.venv/bin/pytest -m 'not aot'

test-aot: .venv-aot/.installed
	JAX_PLATFORMS=cpu .venv-aot/bin/python -m pytest -m aot tests/aot

check: .venv/.installed-dev
	scripts/check

bench: .venv/.installed
	.venv/bin/python benchmarks/serving_cpu.py

.venv/.installed: pyproject.toml scripts/make-venv .venv/.accelerator
	@scripts/make-venv .venv
	@.venv/bin/python -m pip uninstall -qq -y $(OTHER_PLUGINS)
	.venv/bin/python $(PIP) -q -e '.[$(EXTRA)]'
	@touch $@

# Once, and whenever somebody asks; the file changes only with the choice.
.venv/.accelerator: $(if $(filter install,$(MAKECMDGOALS))$(ACCELERATOR),look)
	@scripts/make-venv .venv
	@.venv/bin/python -m jaxserve.accelerators $@

.venv/.installed-dev: .venv/.installed
	.venv/bin/python $(PIP) -q -e '.[dev]'
	@touch $@

.venv-aot/.installed: pyproject.toml scripts/make-venv
	@scripts/make-venv .venv-aot
	.venv-aot/bin/python $(PIP) -q -e '.[test,cuda13,tpu]'
	@touch $@
