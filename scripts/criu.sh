#!/usr/bin/env bash
# Puts a current CRIU, with its Python module pycriu, under $BELAYER_HOME/criu:
#
#   criu        the executable (a wrapper that runs it with its own C library)
#   python/     holds pycriu and nothing else; put it on sys.path (it needs the package protobuf)
#
# Both come from Debian's unstable archive, whatever release this machine runs: Debian 12's CRIU 3.17 cannot restore on
# current kernels (vDSO), and 4.1 fails with any TCP socket. The packages are unpacked beside the host, not installed,
# so no library of the host changes. Built in a folder beside and renamed into place: half a CRIU is never visible.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

OLDEST=4.2
target=$BELAYER_HOME/criu

# criu_of FOLDER ARGUMENT...: runs the CRIU that lies unpacked in FOLDER/root.
criu_of() {
  local root=$1/root loader; shift
  loader=$(echo "$root"/usr/lib/*/ld-linux-*.so.*)
  "$loader" --library-path "${loader%/*}" "$root/usr/sbin/criu" "$@"
}

if [ -x "$target/criu" ] && [ -d "$target/python/pycriu" ] && "$target/criu" --version >/dev/null 2>&1; then
  exit 0
fi

need_root "putting CRIU into $target"
command -v apt-get >/dev/null || fail "no apt-get here; put criu >= $OLDEST at $target/criu and pycriu into $target/python"
mirror=$(debian_mirror)
keyring=$(debian_keyring)
make_work_dir "$BELAYER_HOME"

say "fetching CRIU from $mirror (sid)"
apt=$work/apt
new=$work/criu
mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$new/root" "$new/python"
: >"$apt/status"
echo "deb [signed-by=$keyring] $mirror sid main" >"$apt/sources.list"
run_apt() {
  # An apt of its own: own sources, own lists, an empty list of what is installed. The host's apt is not touched.
  apt-get -qq -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null \
    -o Dir::State::Lists="$apt/lists" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt" \
    -o Dir::Cache::archives="$apt/archives" -o APT::Install-Recommends=false -o Debug::NoLocking=1 \
    -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3 "$@" </dev/null >"$work/log" 2>&1 && return
  tail -n 10 "$work/log" >&2
  fail "could not fetch CRIU (above: apt's last lines). Check that $mirror answers and carries the release 'sid', then run this again"
}
run_apt update
run_apt -y --download-only install criu libc6
(cd "$apt/archives" && run_apt download python3-pycriu)

for package in "$apt"/archives/*.deb; do
  case ${package##*/} in
    python3-pycriu_*) dpkg-deb -x "$package" "$work/pycriu" ;;
    python3* | libpython3* | debconf_* | tzdata_*) ;;
    *) dpkg-deb -x "$package" "$new/root" ;;
  esac
done
# Only what CRIU runs with: its own executable and the libraries.
rm -rf "${new:?}/root/usr/share" "${new:?}/root/etc" "${new:?}/root/var"
mv "$work/pycriu/usr/lib/python3/dist-packages/pycriu" "$new/python/pycriu"

version=$(criu_of "$new" --version 2>&1 | awk '$1 == "Version:" { print $2 }')
[ -n "$version" ] || fail "the CRIU that was fetched does not start here: $(criu_of "$new" --version 2>&1 | tail -n 1)"
[ "$(printf '%s\n' "$OLDEST" "$version" | sort -V | head -n 1)" = "$OLDEST" ] ||
  fail "the mirror's CRIU is $version, Belayer needs $OLDEST or newer; use a mirror that carries Debian's current sid"

loader=$(cd "$new" && echo root/usr/lib/*/ld-linux-*.so.*)
cat >"$new/criu" <<WRAPPER
#!/bin/sh
exec "$target/$loader" --library-path "$target/${loader%/*}" "$target/root/usr/sbin/criu" "\$@"
WRAPPER
chmod +x "$new/criu"

if [ -e "$target" ]; then mv "$target" "$work/old"; fi
mv "$new" "$target"
say "CRIU $version is in $target"
check=$("$target/criu" check 2>&1) || say "warning: 'criu check' says: $(echo "$check" | tail -n 1)"
