#!/usr/bin/env bash
# Gets this machine ready for Belayer. Safe to run again, to interrupt, and to run twice at once.
#
#   setup.sh                everything: Debian packages, .venv, CRIU, a Docker daemon, the sandbox's image (root)
#   setup.sh --no-sandbox   only .venv: enough for the journal, the replay and their tests (no root)
#
# Each step is a script beside this one that does nothing when its work is done; docs/setup.md says what they change.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

sandbox=yes
for argument in "$@"; do
  case $argument in
    --no-sandbox) sandbox=no ;;
    *) fail "usage: setup.sh [--no-sandbox]" ;;
  esac
done

# One set-up at a time in this checkout and on this machine. A folder serves as the lock, so no lock file is left.
lock() { flock -w 900 "$1" || fail "another set-up has been at work for 15 minutes; wait for it or end it, then run this again"; }

exec 7<"$SCRIPTS"
lock 7
if [ $sandbox = yes ]; then
  need_root "set-up"
  mkdir -p "$BELAYER_HOME"
  exec 8<"$BELAYER_HOME"
  lock 8
  "$SCRIPTS/apt.sh" docker.io iptables redis-server debootstrap iproute2 procps git ca-certificates
  # Debian 13 has the client in a package of its own, Debian 12 in docker.io.
  command -v docker >/dev/null || "$SCRIPTS/apt.sh" docker-cli
fi
"$SCRIPTS/venv.sh"
if [ $sandbox = yes ]; then
  "$SCRIPTS/criu.sh"
  "$SCRIPTS/dockerd.sh" start
  "$SCRIPTS/image.sh"
fi
