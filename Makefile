PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL ?= examples/tiny_lm/model

.PHONY: demo test check format clean test-vm

demo: $(READY)
	$(BIN)/python examples/demo.py $(MODEL)

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The verbs transport over Soft-RoCE in a QEMU guest; skipped, by name, where something is missing.
test-vm: $(READY)
	$(BIN)/python -m pytest -s -m 'vm and not slow' tests/vm

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Installs pinned versions and builds the native parts; PIP_ARGS passes options to pip, such as another index.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*/*.cpp csrc/*/*/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf build *.egg-info netstack/*.so lamina/*/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The mlx5 headers with one mistake each, against the software NIC: minutes.
.PHONY: mutants
mutants: $(READY)
	$(BIN)/python tests/netstack/mlx5_mutants.py
