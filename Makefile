# make demo | test | check: each builds its own environment first, once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# uv does not read pip's settings; a folder of wheels named for pip serves it too.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

.PHONY: demo test check slow clean

demo: $(READY)
	$(BIN)/ghostbatch study quick

test: $(READY)
	$(BIN)/python -m pytest -n 2

slow: $(READY)
	$(BIN)/python -m pytest -n 2 -m slow

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(READY): pyproject.toml constraints.txt
	@if command -v uv >/dev/null 2>&1; then \
		uv venv --quiet --allow-existing --python $(PYTHON) $(VENV) && \
		uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]'; \
	else \
		$(PYTHON) -m venv $(VENV) && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	fi
	@touch $@

clean:
	rm -rf $(VENV) runs
