# `make` lists the targets. Everything is installed into .venv (and .venv-engine); nothing outside is touched.
PYTHON ?= python3
VENV ?= .venv
ENGINE_VENV ?= .venv-engine
PORT ?=
LAB_ARGS ?=
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
ENGINE_PY := $(ENGINE_VENV)/bin/python

# Nothing phones home, and nothing looks for models in a hub; HF_HUB_OFFLINE=0 lets you name a hub model.
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY := 1
export DO_NOT_TRACK := 1
export VLLM_NO_USAGE_STATS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
LAB_QUIET := --LabApp.extension_manager=readonly # its panel would list a package index

# A stamp's name holds a hash of the pins it was built from, and it is written last: changed pins or an
# interrupted build leave no stamp of the right name, and the environment is built again.
SHA256 := $(shell command -v sha256sum || echo shasum -a 256)
hash = $(shell cat $(1) | $(SHA256) | cut -c1-16)
BASE_FILES := requirements.txt
TEST_FILES := requirements.txt requirements-test.txt requirements-nodeps.txt
ENGINE_FILES := requirements-engine.txt requirements-engine-nodeps.txt
BASE := $(VENV)/.stamp-$(call hash,$(BASE_FILES))
TEST := $(VENV)/.test-stamp-$(call hash,$(TEST_FILES))
ENGINE := $(ENGINE_VENV)/.stamp-$(call hash,$(ENGINE_FILES))

FIRST_NOTEBOOK := $(firstword $(sort $(wildcard notebooks/[0-9]*.ipynb)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # two pips in one environment would trip over each other
.PHONY: help lab arc test check notebooks html report diagnose compare engine bench clean target

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo "Variables: PYTHON (3.11 or newer), VENV, PORT and LAB_ARGS (lab), PYTEST_ARGS (test, check)."

lab: target ## open the first notebook in JupyterLab (PORT=8889 LAB_ARGS=--no-browser)
	$(PY) -m jupyterlab --ServerApp.root_dir="$(CURDIR)" $(LAB_QUIET) \
	  $(if $(FIRST_NOTEBOOK),--LabApp.default_url=/lab/tree/$(FIRST_NOTEBOOK)) \
	  $(if $(PORT),--ServerApp.port=$(PORT)) $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

arc: target ## the whole diagnosis as one table: incident | here
	$(PY) -m lib.arc

test: $(TEST) ## run every test
	$(PY) -m pytest $(PYTEST_ARGS)

check: $(TEST) ## lint, and the tests that take seconds
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest -m "not slow and not notebooks and not browser and not engine" $(PYTEST_ARGS)

notebooks: $(TEST) ## run the notebooks and write their outputs and facts
	$(PY) -m lib.notebook write
	$(PY) -m lib.arc readme

# Options: make variable -> option of lib.report. One left out takes the report's default; only those given to
# make itself count, so that a DEVICE or OUT of the shell's environment changes no report.
REPORT_OPTIONS := DRAFT CAPTURES TARGET FINALS TAPS CONVENTION LAYOUT LOSS_MASKS DEVICE DTYPE LIMIT DEPTH \
  VERIFY_COST DRAFT_COST OUT SCHEDULER
option = $(if $(filter command,$(origin $(1))),--$(subst _,-,$(shell echo $(1) | tr A-Z a-z)) "$($(1))")

report: $(BASE) ## a report on your files: DRAFT=... CAPTURES=... [TARGET=... TAPS=... CONVENTION=... OUT=...]
	@$(PY) -m lib.report make $(foreach name,$(REPORT_OPTIONS),$(call option,$(name)))

DIAGNOSE_OPTIONS := DRAFT CAPTURES TARGET FINALS TAPS CONVENTION LAYOUT LOSS_MASKS LIMIT OUT

diagnose: $(BASE) ## name the fault in your files: DRAFT=... CAPTURES=... [TARGET=... FINALS=... TAPS=... LIVE=1]
	@$(PY) -m lib.diagnose $(foreach name,$(DIAGNOSE_OPTIONS),$(call option,$(name))) $(if $(LIVE),--live)

compare: $(BASE) ## two reports, paired: BEFORE=.../report.json AFTER=.../report.json [WHICH=best OUT=file.json]
	@$(PY) -m lib.report compare "$(BEFORE)" "$(AFTER)" $(call option,WHICH) $(call option,OUT)

html: $(BASE) ## export the notebooks as single HTML files to html/
	$(PY) -m lib.notebook html

engine: $(ENGINE) ## build the serving engine's own environment (.venv-engine)

# Not among them, because they take more than an hour: bench/blind.py and bench/zoo.py. The table comes last.
bench: $(TEST) ## run the benchmarks, one after the other, and write the README's table of them
	@set -e; for script in $(filter-out $(addprefix bench/,blind.py zoo.py table.py),$(wildcard bench/[!_]*.py)); do echo "== $$script"; $(PY) "$$script"; done
	$(PY) bench/table.py

clean: ## remove caches and exports; keeps the environments, the target model and the samples
	rm -rf html artefacts .pytest_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -path ./.work -prune -o \
	  \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +

# --- how the environments are built --------------------------------------------------------------

define require_python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo >&2 \
  "error: '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true); the workbook needs Python 3.11 or newer." \
  "Name one: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
endef

# The .pth line lets every kernel of this environment import lib/, wherever it was started from; it is relative,
# so that a checkout copied together with its environment uses its own lib/. JupyterLab's announcements plugin
# fetches news and looks for updates, and asks about it on the first start (LabApp.news_url=None does not stop that).
$(BASE):
	$(require_python)
	rm -rf "$(VENV)"
	$(PYTHON) -m venv "$(VENV)"
	$(PY) -m pip install -r requirements.txt
	$(PY) -c 'import os, sysconfig; site = sysconfig.get_path("purelib"); \
	  open(os.path.join(site, "workbook.pth"), "w").write(os.path.relpath(os.getcwd(), site) + "\n")'
	$(PY) -m jupyter labextension disable --level=sys_prefix @jupyterlab/apputils-extension:announcements
	touch $@

# requirements.txt is named again so that no test package can move a version of it.
$(TEST): | $(BASE)
	rm -f "$(VENV)"/.test-stamp-*
	$(PY) -m pip install -r requirements.txt -r requirements-test.txt
	$(PY) -m pip install --no-deps -r requirements-nodeps.txt
	touch $@

$(ENGINE):
	$(require_python)
	rm -rf "$(ENGINE_VENV)"
	$(PYTHON) -m venv "$(ENGINE_VENV)"
	$(ENGINE_PY) -m pip install -r requirements-engine.txt
	$(ENGINE_PY) -m pip install --no-deps -r requirements-engine-nodeps.txt
	touch $@

target: $(BASE)
	$(PY) -m lib.target
