#!/usr/bin/env bash
# Installs the Debian packages that are missing, and starts no service by doing so.
#
#   apt.sh PACKAGE...
#
# Asks apt nothing when every package is there. dpkg finishes what an interrupted run left half done.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

missing=()
for package in "$@"; do installed "$package" || missing+=("$package"); done
[ ${#missing[@]} -gt 0 ] || exit 0

need_root "installing ${missing[*]}"
command -v apt-get >/dev/null || fail "no apt-get here; install by hand: ${missing[*]}"
say "installing ${missing[*]}"

# RUNLEVEL=1 keeps invoke-rc.d from starting daemons on machines without systemd: Belayer starts its own.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
log=$(mktemp)
trap 'rm -f "$log"' EXIT
run() {
  "$@" </dev/null >"$log" 2>&1 && return
  tail -n 15 "$log" >&2
  fail "'$*' failed (above: its last lines). Check the network and the sources in /etc/apt, then run this again"
}
run dpkg --configure -a
apt-get -qq check </dev/null >/dev/null 2>&1 || run apt-get -qq -y --fix-broken install
run apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 update
run apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 -y --no-install-recommends install "${missing[@]}"

# With systemd the package does start a Redis of its own. One that we did not find here we do not leave running.
case " ${missing[*]} " in
  *" redis-server "*)
    if [ -d /run/systemd/system ]; then systemctl disable --quiet --now redis-server </dev/null >&2; fi ;;
esac
