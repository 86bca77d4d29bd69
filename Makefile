# Everything works on a machine that has Python >= 3.12 and reaches PyPI, and nothing else.
# An environment is installed again only when pyproject.toml has changed.

SHELL := /bin/bash
PORT ?= 8000
PIP := -m pip install --disable-pip-version-check --progress-bar off

.PHONY: help install run test test-aot check bench

help:
	@echo 'make install    .venv with jaxserve in it (PYTHON=/path/to/python3.12 to choose one)'
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

.venv/.installed: pyproject.toml scripts/make-venv
	@scripts/make-venv .venv
	.venv/bin/python $(PIP) -q -e .
	@touch $@

.venv/.installed-dev: .venv/.installed
	.venv/bin/python $(PIP) -q -e '.[dev]'
	@touch $@

.venv-aot/.installed: pyproject.toml scripts/make-venv
	@scripts/make-venv .venv-aot
	.venv-aot/bin/python $(PIP) -q -e '.[test,cuda13,tpu]'
	@touch $@
