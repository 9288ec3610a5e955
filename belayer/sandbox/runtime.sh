#!/bin/sh
# runtime.sh REQUEST ARGUMENTS: runc with these arguments, for a container that is to be restored from its images instead
# of created. `launcher.sh` comes here.
#
# Docker's own way (`docker start --checkpoint`) packs and copies the images three times on their way to CRIU. Here the
# request is a file of four lines: this script's name, the images' folder, a folder with CRIU's settings (criu.conf) for
# its logs, and more options for `runc restore`. `create` restores; `start`, which follows, finds the request, removes it
# and has nothing to do. Whatever fails is runc's to say: its messages and exit status are passed on.
set -eu
home=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$home/criu:$PATH"
request=$1
shift
{ read -r _; read -r images; read -r work; read -r options; } < "$request"
export CRIU_CONFIG_FILE="$work/criu.conf"

verb=
count=$#
while [ "$count" -gt 0 ]; do
  count=$((count - 1))
  word=$1
  shift
  if [ -z "$verb" ]; then
    case $word in
      create)
        verb=$word
        # shellcheck disable=SC2086 # the options are words of ours
        set -- "$@" restore --detach --image-path "$images" --work-path "$work" $options
        continue ;;
      start | state | kill | delete | exec | ps | pause | resume | update | events) verb=$word ;;
    esac
  fi
  set -- "$@" "$word"
done

if [ "$verb" = start ]; then
  rm -f "$request"
  exit 0
fi
exec runc "$@"
