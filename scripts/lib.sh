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

# A program that was interrupted together with us may just report a failure; an interrupted script says nothing more.
trap 'exit 130' INT
trap 'exit 143' TERM

# say TEXT: a progress line. Standard error, so that a script's standard output stays its result.
say() { printf '%s\n' "belayer: $*" >&2; }

# fail TEXT: the plain reason and what to do, then exit 2.
fail() { printf '%s\n' "error: $*" >&2; exit 2; }

need_root() {
  [ "$(id -u)" = 0 ] || fail "$1 needs root; run it with sudo, or 'scripts/setup.sh --no-sandbox' for the parts that do not"
}

# make_work_dir PARENT: sets `work` to a fresh folder under PARENT, on PARENT's file system so that a rename out of it is
# atomic. It goes with the script. What killed scripts left (nobody holds its lock any more) is removed first.
make_work_dir() {
  local old
  mkdir -p "$1"
  for old in "$1"/.setup-*; do
    [ -d "$old" ] && flock --nonblock "$old" rm -rf --one-file-system "${old:?}" || true
  done
  work=$(mktemp -d "$1/.setup-XXXXXX")
  exec 6<"$work"
  flock --nonblock 6 || fail "another set-up took $work away; run this again"
  trap 'rm -rf --one-file-system "${work:?}"' EXIT
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
