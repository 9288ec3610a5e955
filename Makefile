# The commands of this repository. Each does by itself all the set-up that it needs.
#
#   make demo [ARGS="--seed 7"]   real agent trajectories survive the death of their engines and sandboxes
#                                  the shortest: ARGS="--trajectories examples/trajectories/sqlfluff__sqlfluff-2419.traj.json --runs 1"
#   make demo ENGINE=sglang        the same with a real SGLang on the CPU, installed in .venv-sglang if need be
#   make test [ARGS="-k journal"]  the tests; those with a real SGLang too, for which it installs SGLang for the CPU once
#                                  (2.5 GB in .venv-sglang); 'make test SGLANG=no' does without and skips them
#   make check                    lint, types and import rules
#   make setup                    only the set-up; 'make setup-venv' without Docker and CRIU (no root)
#   make clean                    removes .venv and caches; docs/setup.md tells how to undo the rest

.PHONY: demo test check setup setup-venv setup-sglang clean
.NOTPARALLEL:
BIN := .venv/bin
SGLANG := yes
ENGINE := recorded

demo: setup $(if $(filter sglang,$(ENGINE)),setup-sglang)
	$(BIN)/belayer demo --engine $(ENGINE) $(ARGS)

test: setup setup-sglang
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

setup-sglang: setup-venv
	@[ "$(SGLANG)" = no ] || scripts/sglang_cpu.sh

clean:
	rm -rf .venv .venv-sglang .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find belayer replay tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
