# make test: own environment, install, linters, all tests.   make demo: the main job on the embedded default.
# make soak: a server under load, attack and misfortune, some 20 minutes.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: install test test-browser chromium lint demo soak wheel clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,data,plot,log,hf,eval,serve,browser]'
	touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

# The page that `loopformer serve` has at `/`, in a real browser; `make test` runs these tests, too, where there is one.
test-browser: install chromium
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser

chromium:
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; }

demo: install
	$(BIN)/python examples/demo.py

soak: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[soak]'
	$(BIN)/python benchmarks/soak.py --out results/serving_soak.json

wheel: install
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
