# make test: own environment, install, linters, all tests.   make demo: the main job on the embedded default.
# make soak: a server under load, attack and misfortune, half an hour.   make docs: the site, in build/site.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: install test test-browser test-kernels test-ray chromium lint demo soak docs wheel clean

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

# The fused kernels without a GPU, in Triton's interpreter: 200 MB more to install, a quarter of an hour.
test-kernels: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target build/interpreter triton==3.6.0 'numpy<2.4'
	PYTHONPATH=build/interpreter TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --timeout=1200 \
		tests/inference/fused/test_kernels.py tests/inference/fused/test_graphs.py \
		tests/inference/fused/test_runner.py tests/inference/fused/test_batch_pool.py tests/inference/test_faults.py \
		tests/training/fused/test_kernels.py

# `loopformer serve --ray`: two replicas, killed and drained; some 500 MB more to install, a few minutes.
test-ray: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[serve,ray]'
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -m ray -rA tests/serving

chromium:
	command -v chromium >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core; }

demo: install
	$(BIN)/python examples/demo.py

soak: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[soak]'
	$(BIN)/python benchmarks/soak.py --commit $$(git describe --always --dirty) --out results/serving/soak.json

# Pages lie as in the repository, so that links between them are right here and there.
docs: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	rm -rf build/pages build/site
	mkdir -p build/pages/src/loopformer/box
	ln -s $(addprefix $(CURDIR)/,README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md CITATION.cff docs examples results) build/pages
	ln -s $(CURDIR)/src/loopformer/box/README.md build/pages/src/loopformer/box
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is in build/site; open build/site/index.html."

wheel: install
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist .

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
