# `make demo` and `make test` set up everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RELEASE ?=
PYTHONS ?=

.PHONY: help
help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo     fetch a real vLLM 0.17.1 into a sandbox, then check, apply, check, diff, revert
.PHONY: demo
demo: $(VENV)/ready
	@$(BIN)/python -m tools.demo

## make test     run the tests, on every release that the issue names; prints the coverage
.PHONY: test
test: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal --cov --cov-report=term-missing

## make test-runtime  real vLLM on the CPU, one release after another, or RELEASE=0.17.1; 3 to 8 GB each
.PHONY: test-runtime
test-runtime: $(VENV)/ready
	$(BIN)/python -m pytest tests/runtime --durations=8 --durations-min=60 $(if $(RELEASE),-k "$(RELEASE)")

## make test-fleet  make dist, then its programs, ssh, Ansible and an image's layers on this machine (root)
.PHONY: test-fleet
test-fleet: dist $(VENV)/ready-for-fleet
	$(BIN)/python -m pytest tests/fleet --numprocesses 2 --dist loadscope --durations=8 --durations-min=5

## make test-pythons  most of the tests, on every Python 3.10 to 3.14 on this machine (PYTHONS="3.10 3.13")
.PHONY: test-pythons
test-pythons: $(VENV)/ready
	@$(BIN)/python -m tools.test_pythons $(PYTHONS)

## make safety   write docs/safety.md: what the tests tried to make it lose a file, and how it ended
.PHONY: safety
safety: $(VENV)/ready
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m safety --write-safety

## make lint     ruff and mypy
.PHONY: lint
lint: $(VENV)/ready-to-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## make format   let ruff format and fix what it can
.PHONY: format
format: $(VENV)/ready-to-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## make matrix   write patches/releases/ from the real wheels: all, or RELEASE=0.34.0
.PHONY: matrix
matrix: $(VENV)/ready
	$(BIN)/python -m tools.write_matrix $(RELEASE)

## make docs     write the generated parts of the documents, build them into build/docs, check their links
.PHONY: docs
docs: $(VENV)/ready-for-docs
	$(BIN)/python -m tools.write_picture
	$(BIN)/python -m tools.write_readme
	$(BIN)/python -m tools.write_doctor_table
	$(BIN)/python -m tools.write_man_pages
	$(BIN)/python -m sphinx -q -E -W --keep-going -c docs . build/docs
	@echo "Every link within the documents leads somewhere. These lead elsewhere and were not followed:"
	@git ls-files -z '*.md' | xargs -0 grep --no-filename --only-matching --extended-regexp 'https?://[^ )>`"|,]+' | sort -u

## make doctor-table  write the table of docs/doctor.md from the rules
.PHONY: doctor-table
doctor-table: $(VENV)/ready
	$(BIN)/python -m tools.write_doctor_table

## make bench    time check and apply against bare imports, as ratios
.PHONY: bench
bench: $(VENV)/ready
	$(BIN)/python -m benchmarks.command_line

## make bench-runtime  what the patch costs a real engine where EAGLE-3 is off, as a ratio
.PHONY: bench-runtime
bench-runtime: $(VENV)/ready
	$(BIN)/python -m benchmarks.runtime_cost

## make bench-acceptance  EAGLE-3 end to end on a GPU: VLLM_PYTHON=an interpreter whose vLLM is patched, OPTIONS=...
.PHONY: bench-acceptance
bench-acceptance: $(VENV)/ready
	$(BIN)/python -m benchmarks.acceptance.end_to_end --python $(VLLM_PYTHON) \
		--tool "$(CURDIR)/$(BIN)/python -m vllm_eagle3_patch" --out build/acceptance/found $(OPTIONS)

## make dist     build the wheel, the sdist and the single-file programs for hosts without an index
.PHONY: dist
dist: $(VENV)/ready-for-dist
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m tools.build_programs dist

## make clean    remove .venv and everything built
.PHONY: clean
clean:
	rm -rf $(VENV) $(VENV)-3.* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

$(VENV)/ready-for-docs: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,docs]'
	@touch $@

$(VENV)/ready-to-lint: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,lint]'
	@touch $@

$(VENV)/ready-for-dist: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,dist]'
	@touch $@

$(VENV)/ready-for-fleet: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,dist,fleet]'
	@touch $@
