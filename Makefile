# Everything from a fresh clone: a virtual environment, the install, the run. The second time it starts at once.
PYTHON ?= python3
VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif

.PHONY: demo test coverage mutants lint docs bench lock audit clean

demo: $(VENV)/installed
	$(BIN)/spear demo

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2

# Of the branches of the core, by its own tests; tests that start Flower, Ray, a browser or the command line reach no more of it.
CORE := errors.py theory.py tolerances.py update factors search judge inversion.py
coverage: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -n 2 --cov --cov-report=term -k "not needs_little_extra_memory" $(addprefix src/spear/,$(CORE)) \
		$(addprefix tests/,test_errors.py test_theory.py test_inversion.py update factors search judge federated verdicts)
	$(BIN)/coverage json -q -o - | $(BIN)/python -c "import json, sys; t = json.load(sys.stdin)['totals']; \
		sys.exit(0 if t['covered_branches'] >= 0.95 * t['num_branches'] else 'under 95 % of the branches')"

# [tool.mutmut] in pyproject.toml says of which module. In an environment of its own: mutmut 3.8 cannot use pytest 9.2.
mutants: $(VENV)/installed-dev
	test -x $(VENV)/mutmut/bin/mutmut || ($(PYTHON) -m venv $(VENV)/mutmut && $(VENV)/mutmut/bin/pip install -q mutmut "pytest<9")
	ls -d $(CURDIR)/$(VENV)/lib/python*/site-packages > $$(echo $(VENV)/mutmut/lib/python*/site-packages)/dev.pth
	OMP_NUM_THREADS=1 $(VENV)/mutmut/bin/mutmut run --max-children 2
	$(VENV)/mutmut/bin/mutmut results

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/installed
	$(BIN)/spear bench --batches 5 --compare 1 --out frontier.jsonl

lock: $(VENV)/installed-dev
	tools/lock.sh

# Known vulnerabilities of what is locked. Asks the network; it lives in an environment of its own.
audit: $(VENV)/installed-dev
	$(BIN)/pip check
	test -x $(VENV)/audit/bin/pip-audit || ($(PYTHON) -m venv $(VENV)/audit && $(VENV)/audit/bin/pip install -q pip-audit)
	$(VENV)/audit/bin/pip-audit --strict --require-hashes --disable-pip -r requirements/dev.lock -r requirements/torch-cuda.lock

# Hash-checked where the locks fit (Linux x86_64, Python 3.11), pinned versions elsewhere: tools/install.py.
$(VENV)/installed: pyproject.toml constraints.txt requirements/run.lock requirements/torch-cpu.lock tools/install.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install.py run
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt requirements/dev.lock requirements/torch-cpu.lock tools/install.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install.py dev
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) mutants site spear-demo spear-results frontier.jsonl .pytest_cache .mypy_cache .ruff_cache
