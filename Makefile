# make demo | test | check | docs | newest | oldest: each builds its own environment first, once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DOCS_READY := $(VENV)/.ready-docs

# The versions of torch and of what comes with it at both ends of what is supported. constraints.txt
# holds for everything else.
RANGE  := torch torchvision triton timm numpy
NEWEST := .venv-newest
OLDEST := .venv-oldest
# Built again on another day, because there may be new releases.
NEWEST_READY := $(NEWEST)/.ready-$(shell date +%F)
OLDEST_READY := $(OLDEST)/.ready
TORCH_TESTS  := tests/ops tests/nn tests/optim tests/diagnostics tests/train

# uv does not read pip's settings; a folder of wheels named for pip serves it too.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)

.PHONY: demo test check slow docs newest oldest clean

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

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo site/index.html

newest: $(NEWEST_READY)
	$(NEWEST)/bin/python -m pytest -n 2 $(TORCH_TESTS)

oldest: $(OLDEST_READY)
	$(OLDEST)/bin/python -m pytest -n 2 $(TORCH_TESTS)

# $(call install,FOLDER,OPTIONS,EXTRAS) makes an environment in FOLDER; OPTIONS are for pip or uv pip.
# Without EXTRAS it has those for development.
define install
	@echo "setting up $(1), which takes minutes and several GB"
	@if command -v uv >/dev/null 2>&1; then \
		uv venv --quiet --allow-existing --python $(PYTHON) $(1) && \
		uv pip install --quiet --python $(1)/bin/python $(2) -e '.[$(or $(3),dev)]'; \
	else \
		$(PYTHON) -m venv $(1) && \
		$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2) -e '.[$(or $(3),dev)]'; \
	fi
	@touch $@
endef

# $(call unpin,FOLDER) leaves nothing in FOLDER but the constraints without those of RANGE.
define unpin
	@rm -rf $(1) && mkdir $(1)
	@sed $(RANGE:%=-e '/^%==/d') constraints.txt >$(1)/constraints.txt
endef

$(READY): pyproject.toml constraints.txt
	$(call install,$(VENV),-c constraints.txt)

$(DOCS_READY): $(READY)
	$(call install,$(VENV),-c constraints.txt,docs)

$(NEWEST_READY): pyproject.toml constraints.txt
	$(call unpin,$(NEWEST))
	$(call install,$(NEWEST),-c $(NEWEST)/constraints.txt)

$(OLDEST_READY): pyproject.toml constraints.txt constraints-oldest.txt
	$(call unpin,$(OLDEST))
	$(call install,$(OLDEST),-c $(OLDEST)/constraints.txt -c constraints-oldest.txt)

clean:
	rm -rf $(VENV) $(NEWEST) $(OLDEST) runs site
