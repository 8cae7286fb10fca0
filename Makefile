PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL ?= examples/tiny_lm/model
# Tests wait for other processes a quarter of their time: three at once keep two cores busy.
JOBS ?= 3
PYTEST = $(BIN)/python -m pytest $(ALL)
LANDING = $(BIN)/python tests/landing.py
ALL = -n $(JOBS) --dist worksteal
RAY = -m slow --session-timeout=1500 tests/cluster/test_over_ray.py
NATIVE = $(shell find csrc tests perf -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-all test-ray landing test-slow lint check properties format fuzz clean test-vm test-vm-all weekly

demo: $(READY)
	$(BIN)/python examples/demo.py $(MODEL) $(ARGS)

# The tests that are not long, with a whole path of each subject among them.
test: $(READY)
	$(PYTEST) -m 'not long and not slow and not gpu and not rdma and not vm'

# The tests that need neither a device nor minutes, as pytest itself selects them.
test-all: $(READY)
	$(LANDING) $(ALL)

# Workers on the nodes of a real Ray cluster on this machine, one test after another, with a time limit.
test-ray: $(READY)
	$(LANDING) $(RAY)

# The tests of CI, with one count for both runs; CONTRIBUTING.md says when a failed test is retried.
landing: $(READY)
	$(LANDING) $(RAY) --and $(ALL)

# All that is slow and needs neither a device nor a download.
test-slow: $(READY)
	$(PYTEST) -m 'slow and not gpu and not rdma and not vm' --ignore=tests/clients

# What nobody waits for; see CONTRIBUTING.md. All of it is run, also where an early part has failed.
weekly: $(READY)
	$(MAKE) --keep-going test-attack test-slow test-clients test-vm-all mutants mutation properties ranges

# Attacks on a real server on loopback, with a limit of memory: about 6 minutes. ATTACKS: some of them.
.PHONY: test-attack
test-attack: $(READY)
	$(BIN)/python tests/attack $(ATTACKS)

# The verbs transport over Soft-RoCE in a QEMU guest; skipped, by name, where something is missing.
test-vm: $(READY)
	$(BIN)/python -m pytest -s -m 'vm and not slow' tests/vm

# The same, deaths and stops, two guests on a wire that loses packets, and Lamina itself in a guest: about 8 minutes.
test-vm-all: $(READY)
	$(BIN)/python -m pytest -s -m vm tests/vm

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	$(BIN)/mypy
	$(BIN)/python tests/lints/docstrings.py
	$(BIN)/python tests/lints/prose.py

check: lint test

# The property tests with examples that no run has tried before.
properties: $(READY)
	$(PYTEST) --hypothesis-profile=search \
	  -m 'hypothesis and not slow and not gpu and not rdma and not vm'

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)


# Installs pinned versions and builds the native parts; PIP_ARGS passes options to pip, such as another index.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*/*.cpp csrc/*/*/*.h tests/soft_nic/*.h tests/soft_nic/*.cpp) tests/soft_nic/setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): minutes the first time"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	$(BIN)/python tests/soft_nic/setup.py --quiet build_ext --inplace
	touch $@

# The frame decoder under hostile streams, for FUZZ_SECONDS. With clang++ the fuzzer follows the branches it finds.
FUZZ_SECONDS ?= 60
fuzz:
	mkdir -p build/fuzz/corpus
	@if command -v clang++ >/dev/null; then set -e; \
	  clang++ -std=c++17 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -DLIBFUZZER -Icsrc \
	    tests/netstack/bytes/fuzz_frame.cpp -o build/fuzz/fuzz_frame; \
	  build/fuzz/fuzz_frame -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -print_final_stats=1 build/fuzz/corpus \
	    > build/fuzz/log 2>&1 || { tail -n 60 build/fuzz/log; exit 1; }; \
	  tail -n 5 build/fuzz/log; \
	else set -e; \
	  g++ -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -Icsrc tests/netstack/bytes/fuzz_frame.cpp \
	    -o build/fuzz/fuzz_frame; \
	  end=$$(( $$(date +%s) + $(FUZZ_SECONDS) )); \
	  while [ $$(date +%s) -lt $$end ]; do build/fuzz/fuzz_frame 200000 $$(date +%s); done; \
	fi

clean:
	rm -rf build *.egg-info netstack/*/*.so lamina/*/*/*.so tests/soft_nic/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The pages of docs/ and of this folder as a site with search: build/site/index.html. A broken link fails.
.PHONY: docs
docs: $(READY)
	test -x $(BIN)/mkdocs || $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt \
	  $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	rm -rf build/docs && mkdir -p build/docs
	git ls-files -co --exclude-standard docs perf examples '*.md' | grep -vE '^(tests|lamina)/|\.(py|jsonl)$$' | xargs cp --parents -t build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The mlx5 headers with one mistake each, against the software NIC: minutes.
.PHONY: mutants
mutants: $(READY)
	$(BIN)/python tests/netstack/nic/mlx5_mutants.py

# Mistakes made on purpose in policy and links, each of which a fast test must see: long. GROUPS: some of it.
.PHONY: mutation
mutation: $(READY)
	$(BIN)/python tests/mutation.py $(GROUPS)

# Real clients of OpenAI's API, each in an environment of its own under build/clients, and Lamina's wheel in an empty
# one for each Python: downloads, and minutes.
.PHONY: test-clients
test-clients: $(READY)
	$(BIN)/python -m pytest -m slow tests/clients

# Both ends of each version range in pyproject.toml, in environments under build/ranges: downloads, and an hour.
.PHONY: ranges
ranges: $(READY)
	$(BIN)/python tests/ranges.py $(ENVIRONMENTS)

# The suites of others, run on Lamina: downloads below build/suites, and minutes. SUITES: some of them.
.PHONY: test-suites
test-suites: $(READY)
	$(BIN)/python tests/suites/run.py $(SUITES)
