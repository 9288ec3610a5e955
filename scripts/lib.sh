# Sourced by the scripts beside it. Names where things lie and how a step speaks; does nothing by itself.
#
# BELAYER_HOME  Belayer's own folder on this machine (default /var/lib/belayer). Everything that set-up makes outside
#               the checkout and apt's packages lies under it.

set -euo pipefail

: "${BELAYER_HOME:=/var/lib/belayer}"
export BELAYER_HOME
# A caller that changed folder, or a relative BELAYER_HOME, must not move things about.
case $BELAYER_HOME in
  /?*) ;;
  *) echo "error: BELAYER_HOME must be an absolute path below /, not '$BELAYER_HOME'" >&2; exit 2 ;;
esac
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SCRIPTS=$REPO/scripts

# say TEXT: a progress line. Standard error, so that a script's standard output stays its result.
say() { printf '%s\n' "belayer: $*" >&2; }

# fail TEXT: the plain reason and what to do, then exit 2.
fail() { printf '%s\n' "error: $*" >&2; exit 2; }

need_root() {
  [ "$(id -u)" = 0 ] || fail "$1 needs root; run it with sudo, or 'scripts/setup.sh --no-sandbox' for the parts that do not"
}

# work_dir PARENT: a fresh folder under PARENT, on PARENT's file system so that a rename out of it is atomic.
# What an interrupted run left behind (its owner is gone) is removed first.
work_dir() {
  local parent=$1 old owner
  mkdir -p "$parent"
  for old in "$parent"/.setup-*; do
    [ -d "$old" ] || continue
    owner=${old##*/.setup-}; owner=${owner%%.*}
    [ -d "/proc/$owner" ] || rm -rf --one-file-system "${old:?}"
  done
  mktemp -d "$parent/.setup-$$.XXXXXX"
}

# debian_mirror: prints the address of the Debian mirror that this machine's apt uses, without a slash at its end.
# apt reads its own sources (one-line and deb822 alike); third-party archives and the security archive are left out.
debian_mirror() {
  local codename mirror
  # shellcheck source=/dev/null
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  mirror=$(apt-get indextargets --format '$(ORIGIN)|$(RELEASE)|$(COMPONENT)|$(REPO_URI)' 'Created-By: Packages' |
    awk -F'|' -v codename="$codename" '
      $3 != "main" || $4 ~ /security/ { next }
      $1 == "Debian" && $2 == codename { print 1, $4; next }
      $1 == "Debian" { print 2, $4; next }
      $1 == "" && $4 ~ /\/debian\/?$/ { print 3, $4 }' | sort -n | awk 'NR == 1 { print $2 }')
  [ -n "$mirror" ] || fail "apt's sources name no Debian mirror; add one to /etc/apt/sources.list.d and run 'apt-get update'"
  printf '%s\n' "${mirror%/}"
}

# debian_keyring: prints the path of the keys that Debian signs its archive with.
debian_keyring() {
  local keyring
  for keyring in /usr/share/keyrings/debian-archive-keyring.{gpg,pgp}; do
    if [ -e "$keyring" ]; then printf '%s\n' "$keyring"; return; fi
  done
  fail "Debian's archive keys are missing; run 'apt-get install debian-archive-keyring'"
}
