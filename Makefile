# Two commands do everything, set-up included: `make train` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Tests of real processes wait for half of their time, so three run at once. The fast tests only compute.
# Tests that share a fixture of their module run in one process. One at a time: make test JOBS=
JOBS ?= --numprocesses=3 --dist=loadgroup
FAST_JOBS := $(subst =3 --dist=loadgroup,=2 --dist=worksteal,$(JOBS))

# A failure within a pipe is one, as in the set-up, which shows a line for each large package.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
LOG := .venv/setup.log
AZURITE := .venv/.azurite
PIP := $(BIN)/python -m pip install --progress-bar off -c constraints.txt
TELL := 2>&1 | tee -a $(LOG) | sed -unE \
	-e 's/^ *(Downloading|Using cached) ([^-]+-[^-]+)-.*(\([0-9]{2,}\.[0-9]+ MB\)).*/  \2 \3/p' \
	-e 's/^Installing collected packages.*/  installing/p' -e '/^ *ERROR/p'

# Each module is compiled once, and not by every process of every test.
export PYTHONDONTWRITEBYTECODE :=
export OMP_NUM_THREADS ?= 1
export MPLBACKEND ?= Agg
export NO_MKDOCS_2_WARNING ?= 1

.PHONY: train test test-long check chaos goodput gpu plan sbom docs docs-serve setup clean

train: $(STAMP)  ## four learners, two syncer shards, an evaluator; one learner is killed on the way
	$(BIN)/ddiloco train recipes/quickstart.toml

# Unit tests that simulate whole runs, search a plan or start processes take most of the time: they are in the second part.
FAST := tests/unit
SLOWER := $(wildcard $(addprefix tests/unit/,chaos engines export goodput launch plan privacy run_model show simulate study tape \
	learner/test_many_tensors.py test_benchmarks.py test_doctests_unit.py))
OTHERS := $(filter-out $(FAST) %/__pycache__,$(patsubst %/,%,$(wildcard tests/*/))) $(SLOWER)

test: $(STAMP) $(AZURITE) check  ## every feature and every deliberate break, in about 25 minutes on two cores
	$(BIN)/pytest -q $(JOBS) -m "not long" $(OTHERS)

test-long: $(STAMP) $(AZURITE)  ## the other tests, in less than an hour: before a release
	$(BIN)/pytest -q $(JOBS) -m long tests

check: $(STAMP)  ## format, lint, types and the fast tests, in at most 100 seconds
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy & $(BIN)/pytest -q $(FAST_JOBS) -m "not long" $(FAST) \
		$(addprefix --ignore=,$(SLOWER)) && wait $$!

chaos: $(STAMP)  ## half an hour of failures of every kind, and the verdict
	$(BIN)/ddiloco chaos chaos-long

gpu: $(STAMP)  ## on a machine with a GPU: every CUDA path, in ten minutes: benchmarks/results/gpu
	@code=0; $(BIN)/python benchmarks/gpu.py || code=$$?; \
		$(BIN)/python benchmarks/result_tables.py && exit $$code

goodput: $(STAMP)  ## table and plots of what failures cost a million chips: benchmarks/results/goodput
	$(BIN)/python benchmarks/goodput.py
	$(BIN)/python benchmarks/result_tables.py

plan: $(STAMP)  ## the planner's tables and plots: benchmarks/results/plan
	$(BIN)/python benchmarks/plan_tables.py
	$(BIN)/python benchmarks/result_tables.py

sbom: $(STAMP)  ## what an installation brings, with versions and licences: dist/sbom.json
	$(BIN)/python deploy/sbom.py dist/sbom.json --extras cli

docs: $(STAMP)  ## the documentation, as a folder of pages: site/index.html
	$(BIN)/mkdocs build --strict --quiet

docs-serve: $(STAMP)  ## the documentation at http://127.0.0.1:8000, rebuilt when it changes
	$(BIN)/mkdocs serve

setup: $(STAMP)

$(STAMP): pyproject.toml packages/plan/pyproject.toml packages/engines/pyproject.toml packages/lab/pyproject.toml \
		constraints.txt
	@echo "set-up, once and for some minutes: Python packages into .venv; all that pip says: $(LOG)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "1 of 3: pip"
	@$(PIP) --upgrade pip $(TELL)
	@echo "2 of 3: PyTorch, with its libraries the most of it"
	@$(PIP) torch $(TELL)
	@echo "3 of 3: decoupled-diloco, and what develops and tests it"
	@$(PIP) --editable '.[cli]' --editable packages/plan --editable packages/engines --editable packages/lab \
		--group dev $(TELL)
	@touch $(STAMP)

# A server of az:// for tests. It is large, and only tests need it; without npm, they are skipped.
$(AZURITE): Makefile
	@! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix .venv azurite@3.37.0 \
		2>>$(LOG) || true
	@mkdir -p $(@D) && touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist site
