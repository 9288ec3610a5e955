#!/usr/bin/env bash
# A virtual environment with SGLang 0.5.17 on the CPU and Belayer's plugin in it, for the tests that need a real
# engine. Apart from .venv, because SGLang pins much. 0.6 GB to fetch, 2.5 GB on the disk, one to five minutes; installs
# again only when its list, the stand-ins or the Python changed. Where pip's index has PyTorch for CUDA alone it fetches
# 3 GB more; let pip find the build for the CPU as well (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL) to save that.
#
#   scripts/sglang_cpu.sh          makes it (VENV=FOLDER for another place than .venv-sglang)
#   scripts/sglang_cpu.sh where    prints its python when it is there
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

venv=${VENV:-$REPO/.venv-sglang}
stamp=$venv/.belayer-installed
SGLANG=0.5.17

digest() {
  { cat "$SCRIPTS/sglang_cpu.sh" "$SCRIPTS/sglang_cpu.txt"; find "$SCRIPTS/sglang_stubs" -name '*.py' | sort | xargs cat
    sed -n '/entry-points/,/^$/p' "$REPO/pyproject.toml"; "$venv/bin/python" --version; } 2>/dev/null | sha256sum | cut -c 1-16
}

if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(digest)" ]; then
  [ "${1:-}" != where ] || printf '%s\n' "$venv/bin/python"
  exit 0
fi
[ "${1:-}" != where ] || fail "SGLang is not installed; run scripts/sglang_cpu.sh"

exec 7<"$SCRIPTS/sglang_cpu.txt"
flock -w 900 7 || fail "another run has been installing SGLang for 15 minutes; wait for it or end it"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check "$@" </dev/null >"$log" 2>&1 ||
    { grep -v '^WARNING' "$log" | tail -n 8 >&2; fail "pip could not install $* (above: its last lines). Check the network, then run this again"; }
}

say "installing SGLang $SGLANG for the CPU into ${venv#"$REPO"/} (0.6 GB to fetch, some minutes)"
python=${PYTHON:-$REPO/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
  fail "SGLang $SGLANG needs Python 3.11 to 3.13; set PYTHON to one"
rm -f "$stamp"
"$python" -m venv --clear "$venv"
install --no-deps "sglang==$SGLANG"
install --requirement "$SCRIPTS/sglang_cpu.txt"
install --no-deps triton
install --no-deps --editable "$REPO"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$SCRIPTS"/sglang_stubs/* "${site:?}/"
SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c 'import sglang.srt.entrypoints.http_server' >"$log" 2>&1 ||
  { tail -n 5 "$log" >&2; fail "SGLang is installed and does not import (above: why)"; }
digest >"$stamp"
