# Everything a newcomer types. The first use of any target makes .venv and installs what it needs.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PEERS := $(VENV)/.peers
CLASSES := $(VENV)/spark-classes.jsa
export SPARK_LOCAL_IP := 127.0.0.1
# Tests start Python some thousand times: what it has compiled is kept, wherever containers say no.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo first docs test test-unit test-fault test-hosts test-spark chaos spec lint format bench bench-quick bench-latency clean

help:  ## list what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (the first time takes some minutes) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[spark,dev]'
	@touch $@

demo: $(INSTALLED)  ## two Spark jobs fill one table; one is killed, and nothing counts twice
	@$(RUN) -m examples.wide_table

first: $(INSTALLED)  ## create a table, put two batches, look keys up: no servers, no Spark
	@$(RUN) examples/first_table.py

docs: $(INSTALLED)  ## the documentation as a site: build/site/index.html
	@$(RUN) docs/site.py build/docs
	@NO_MKDOCS_2_WARNING=true $(VENV)/bin/mkdocs build --strict

# Spark starts in half the time, and tests start it often.
$(CLASSES): $(INSTALLED)
	@$(RUN) -m tests.support.java_classes

test: $(INSTALLED) $(CLASSES)  ## all tests, in parallel
	@$(RUN) -m pytest -q -n 2 --dist worksteal

test-unit: $(INSTALLED)  ## the fast tests only
	@$(RUN) -m pytest -q -n 2 tests/unit

test-fault: $(INSTALLED) $(CLASSES)  ## crash and model tests for a long time (TALLYBOOK_EXAMPLES=1000)
	@TALLYBOOK_EXAMPLES=$${TALLYBOOK_EXAMPLES:-1000} $(RUN) -m pytest -q -n 2 -o timeout=0 tests/fault tests/property

test-hosts: $(INSTALLED) $(CLASSES)  ## every fault on a bed of several hosts (namespaces; no root needed)
	@$(RUN) -m pytest -q -s -m hosts tests/multihost

# All of the sink's tests but those of Spark Connect, which has versions of its own.
SINK_TESTS = $(filter-out %_on_connect.py, $(wildcard tests/integration/test_sink*.py))

# An environment of its own for another Spark. It is made once. Warnings are Spark's: old ones have many.
SPARK_ENV = build/spark-$(VERSION)
build/spark-%/.installed: pyproject.toml constraints.txt
	@echo "Installing Spark $* into build/spark-$* ..."
	@$(PYTHON) -m venv build/spark-$*
	@grep -v -e '^pyspark==' -e '^py4j==' constraints.txt > build/spark-$*/constraints.txt
	@build/spark-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint build/spark-$*/constraints.txt 'pyspark==$*' 'pandas>=2.2,<3' \
		hypothesis pytest pytest-timeout setuptools --editable .
	@touch $@

test-spark:  ## the sink on another version of Spark: VERSION=3.5.9
	@test -n "$(VERSION)" || { echo "which one? make test-spark VERSION=3.5.9"; exit 2; }
	@$(MAKE) --no-print-directory $(SPARK_ENV)/.installed
	@$(SPARK_ENV)/bin/python -m pytest -q -p no:cacheprovider -o filterwarnings= \
		$(if $(QUICK),-k 'written_once or stopped_begins or readers' \
		tests/integration/test_sink_use.py, $(SINK_TESTS))

chaos: $(INSTALLED) $(CLASSES)  ## random faults on several hosts, several at once: SECONDS=300 SEED=0 SPARK=
	@$(RUN) -m tests.multihost.campaign --seconds $(or $(SECONDS),300) --seed $(or $(SEED),0) $(if $(SPARK),--spark)

spec:  ## run the executable specification: 20,000 histories, and each rule switched off
	@$(PYTHON) docs/spec/protocol.py
	@for rule in $$($(PYTHON) docs/spec/protocol.py --rules); do \
		! $(PYTHON) docs/spec/protocol.py 100000 --break $$rule > /dev/null || { echo "$$rule is not caught"; exit 1; }; \
	done; echo "each rule, switched off, is caught"

lint: $(INSTALLED)  ## ruff and mypy
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/mypy

format: $(INSTALLED)  ## let ruff fix and format
	@$(VENV)/bin/ruff check --fix --quiet .
	@$(VENV)/bin/ruff format --quiet .

$(PEERS): $(INSTALLED)
	@$(RUN) -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt --editable '.[bench]'
	@touch $@

bench: $(PEERS)  ## all figures, beside peers and baselines, into benchmarks/results.md (up to half an hour)
	@$(RUN) -m benchmarks --results benchmarks

bench-quick: $(PEERS)  ## small sizes, into build/bench-quick: for every commit
	@$(RUN) -m benchmarks --quick --results build/bench-quick

bench-latency: $(PEERS)  ## ten minutes of puts: the longest, and p99 over p50
	@$(RUN) -m benchmarks put_latency --results build/bench-latency

clean:  ## remove what the other targets made
	@rm -rf $(VENV) build .hypothesis .mypy_cache .pytest_cache .ruff_cache
