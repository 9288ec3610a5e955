#!/bin/sh
# Docker's OCI runtime `belayer`: runc, except that a container for which a restore is requested is left to the version
# of our runtime that the request names.
#
# Docker knows one runtime by one path, and checkouts of several versions may share a machine: this file therefore never
# changes, and what may change is in `runtime.sh`, which lies beside it under a name with its digest. A request is the
# file BELAYER_HOME/restore/ID; its first line is that name.
set -eu
here=$(dirname "$0")
for id in "$@"; do :; done
request=$here/../restore/${id:-none}
[ -f "$request" ] || exec runc "$@"
read -r version < "$request"
exec "$here/$version" "$request" "$@"
