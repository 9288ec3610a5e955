# The commands of this repository. Each does by itself all the set-up that it needs.
#
#   make demo [ARGS="--seed 7"]   real agent trajectories survive the death of their engines and sandboxes
#   make test [ARGS="-k journal"]  the tests
#   make check                    lint, types and import rules
#   make setup                    only the set-up; 'make setup-venv' without Docker and CRIU (no root)
#   make clean                    removes .venv and caches; docs/setup.md tells how to undo the rest

.PHONY: demo test check setup setup-venv clean
.NOTPARALLEL:
BIN := .venv/bin

demo: setup
	$(BIN)/belayer demo $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

check: setup-venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

setup:
	@scripts/setup.sh

setup-venv:
	@scripts/setup.sh --no-sandbox

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find belayer replay tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
