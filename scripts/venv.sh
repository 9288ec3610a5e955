#!/usr/bin/env bash
# The virtual environment .venv with Belayer (editable) and everything that its development needs.
#
# Installs again only when pyproject.toml or the Python changed: a digest of both is written into .venv when all is in.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

venv=$REPO/.venv
stamp=$venv/.belayer-installed

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if new_enough "$candidate"; then command -v "$candidate"; return; fi
  done
  fail "no Python 3.11 or newer on PATH; install one ('apt-get install python3' on Debian 12 or 13) or set PYTHON to its path"
}

digest() { { cat "$REPO/pyproject.toml"; "$venv/bin/python" --version; } 2>/dev/null | sha256sum | cut -c 1-16; }

run() {
  local log status=0
  log=$(mktemp)
  "$@" </dev/null >"$log" 2>&1 || status=$?
  [ "$status" = 0 ] || grep -v '^WARNING' "$log" | tail -n 10 >&2
  rm -f "$log"
  return "$status"
}

if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(digest)" ]; then exit 0; fi

# A venv whose Python is gone (upgraded, moved) or that has no pip (interrupted while it was made) is made anew.
if ! { new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
  python=$(find_python)
  "$python" -c 'import ensurepip' 2>/dev/null || "$SCRIPTS/apt.sh" python3-venv
  say "making .venv with $("$python" --version)"
  run "$python" -m venv --clear "$venv" ||
    fail "could not make $venv (above: why). Is the disk full, or the folder not yours?"
fi

say "installing Belayer and its packages into .venv"
rm -f "$stamp"
run "$venv/bin/python" -m pip install --disable-pip-version-check --editable "$REPO[dev]" ||
  fail "pip could not install Belayer (above: its last lines). Check the network and 'pip config list', then run this again"
digest >"$stamp"
