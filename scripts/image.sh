#!/usr/bin/env bash
# The sandbox's base image belayer-base:bookworm: a small Debian 12 with Python, git and common test dependencies.
#
# Built with debootstrap from this machine's own Debian mirror, because no registry may be reachable. Skipped when the
# image carries the digest of this very recipe in its label belayer.recipe. The image appears in Docker only
# when it is complete.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

IMAGE=belayer-base:bookworm
# Raised when what this file puts into the image changes otherwise than by PACKAGES.
RECIPE=1
PACKAGES=python3,python-is-python3,git,patch,ca-certificates,procps,python3-pytest,python3-asgiref,python3-sqlparse,python3-tz,python3-dateutil,python3-simplejson,python3-wrapt,python3-lazy-object-proxy,python3-typing-extensions

recipe=$(echo "$RECIPE $PACKAGES" | sha256sum | cut -c 1-16)
label() { timeout 30 docker image inspect --format '{{index .Config.Labels "belayer.recipe"}}' "$IMAGE" </dev/null 2>/dev/null || true; }

[ "$(label)" != "$recipe" ] || exit 0
need_root "building the sandbox image"
mirror=$(debian_mirror)
keyring=$(debian_keyring)
make_work_dir "$BELAYER_HOME"
tree=$work/tree

say "building $IMAGE from $mirror (about a minute, once)"
# What debootstrap mounts and starts vanishes with this namespace, however it ends.
# dpkg need not sync a tree that we throw away, and documentation is left out before it is unpacked.
mkdir -p "$tree/etc/dpkg/dpkg.cfg.d"
cat >"$tree/etc/dpkg/dpkg.cfg.d/belayer" <<'CONFIG'
force-unsafe-io
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/man/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/locale/*
path-exclude=/usr/share/lintian/*
CONFIG
unshare --mount --pid --fork --kill-child debootstrap --variant=minbase --include="$PACKAGES" --keyring="$keyring" \
  bookworm "$tree" "$mirror" </dev/null >"$work/log" 2>&1 || {
  tail -n 10 "$work/log" "$tree/debootstrap/debootstrap.log" 2>/dev/null >&2
  fail "debootstrap failed (above: its last lines). Check that $mirror answers and that the disk has 1 GB free, then run this again"
}

# Bound by name below the tree's root, so an empty variable cannot reach the host's folders.
(cd "$tree" && rm -rf ./usr/share/{doc,man,info,locale,lintian} ./var/cache/apt ./var/lib/apt/lists ./var/log/* ./debootstrap &&
  mkdir -p ./var/cache/apt/archives/partial ./var/lib/apt/lists/partial ./testbed)

say "importing $IMAGE into Docker"
tar -C "$tree" --numeric-owner --sort=name --exclude='./dev/*' --exclude='./proc/*' --exclude='./sys/*' -c . |
  docker import --change "LABEL belayer.recipe=$recipe" --change 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    --change 'ENV LANG=C.UTF-8' --change 'WORKDIR /testbed' --change 'CMD ["/bin/bash"]' - "$IMAGE" >"$work/import" 2>&1 || {
  tail -n 5 "$work/import" >&2
  fail "Docker did not take the image (above: its message); 'scripts/dockerd.sh status' tells how Docker is"
}
[ "$(label)" = "$recipe" ] || fail "Docker has no $IMAGE after the import; 'docker images' and the log of dockerd may tell why"
