#!/usr/bin/env bash
# A Docker daemon on machines where nothing else runs one (no systemd).
#
#   dockerd.sh start    if no daemon answers, starts one that knows our OCI runtime and has our CRIU first on its PATH
#   dockerd.sh stop     stops the one that 'start' started, and no other
#   dockerd.sh status   one line; exit status 0 when a daemon answers, 1 otherwise
#
# Two daemons in one network namespace destroy each other's rules, so 'start' holds a lock while it looks and starts.
# The daemon survives this script and holds none of its caller's files open. Log, process id and data lie under
# $BELAYER_HOME/dockerd.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

START_S=30
STOP_S=30
folder=$BELAYER_HOME/dockerd
pidfile=$folder/pid
log=$folder/log

answers() { timeout 10 docker version --format '{{.Server.Version}}' </dev/null >/dev/null 2>&1; }

# our_pid: prints the process id of the daemon that we started, if it still runs.
our_pid() {
  local pid
  pid=$(cat "$pidfile" 2>/dev/null) || return 1
  # Its name guards against a reused id, its state against one that is dead and not yet reaped.
  grep -qs '^Name:[[:space:]]*dockerd$' "/proc/$pid/status" || return 1
  ! grep -qs '^State:[[:space:]]*[ZX]' "/proc/$pid/status" || return 1
  echo "$pid"
}

# wait_for SECONDS COMMAND...: until the command succeeds; 1 when it did not in time.
wait_for() {
  local deadline=$((SECONDS + $1)); shift
  until "$@"; do
    [ "$SECONDS" -lt "$deadline" ] || return 1
    sleep 0.1
  done
}

describe() {
  local info
  info=$(timeout 10 docker info --format '{{.ServerVersion}}, runtimes{{range $name, $_ := .Runtimes}} {{$name}}{{end}}, storage {{.Driver}}, {{.DockerRootDir}}' </dev/null 2>/dev/null)
  if our_pid >/dev/null; then echo "dockerd $info, started by Belayer"; else echo "dockerd $info, not started by Belayer"; fi
}

# A daemon that was here before is used as it is: restarting it would end its owner's containers.
remark_on_foreign() {
  our_pid >/dev/null && return
  timeout 10 docker info --format '{{range $name, $_ := .Runtimes}}{{$name}} {{end}}' </dev/null 2>/dev/null | grep -qw belayer && return
  say "note: the Docker daemon here was not started by Belayer and does not know the OCI runtime 'belayer', so it cannot"
  say "      restore containers. Add this to /etc/docker/daemon.json and send dockerd SIGHUP (no container is disturbed):"
  say "      \"runtimes\": {\"belayer\": {\"path\": \"$BELAYER_HOME/runtime/runc\"}}"
}

launch() {
  (
    # Nothing of the caller's may stay open in the daemon: a CI job would wait for its end.
    for fd in /proc/"$BASHPID"/fd/*; do
      fd=${fd##*/}
      [ "$fd" -le 2 ] || eval "exec $fd>&-"
    done
    # The daemon and its containers run at normal priority even when set-up was started under nice.
    renice -n 0 -p "$BASHPID" >/dev/null 2>&1 || true
    export PATH=$BELAYER_HOME/criu:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    cd /
    # The runtime's script is put there by Belayer itself (belayer/sandbox/runtime.sh); --experimental is for benchmarks.
    exec setsid dockerd --experimental --add-runtime "belayer=$BELAYER_HOME/runtime/runc" --pidfile "$pidfile" --data-root "$folder/data" </dev/null >>"$log" 2>&1
  ) &
  launched=$!
}

ready_or_gone() { answers || ! { kill -0 "$launched" 2>/dev/null || our_pid >/dev/null; }; }

containerd_settled() {
  local pid
  pid=$(cat /run/docker/containerd/containerd.pid 2>/dev/null) || return 0
  ! grep -qs '^State:[[:space:]]*Z' "/proc/$pid/status"
}

give_up() {
  echo "--- the last lines of $log:" >&2
  tail -n 12 "$log" >&2
  fail "dockerd $1. The lines above say why; 'scripts/dockerd.sh start' tries again"
}

start() {
  mkdir -p "$folder"
  exec 9>"$folder/lock"
  flock -w $((START_S + 10)) 9 || fail "another 'dockerd.sh start' is still at work (it holds $folder/lock)"
  if answers; then remark_on_foreign; return; fi
  case ${DOCKER_HOST:-} in
    "" | unix:///var/run/docker.sock | unix:///run/docker.sock) ;;
    *) fail "DOCKER_HOST=$DOCKER_HOST does not answer; start that daemon, or unset DOCKER_HOST to let Belayer start one" ;;
  esac
  need_root "starting dockerd"
  command -v dockerd >/dev/null || fail "dockerd is not installed; run scripts/setup.sh"
  [ -x "$BELAYER_HOME/criu/criu" ] || fail "CRIU is not in $BELAYER_HOME/criu; run scripts/criu.sh first"
  if pid=$(our_pid); then
    # It runs but does not answer: perhaps it is still starting, or hangs.
    wait_for 10 answers && return
    fail "dockerd (process $pid) runs but does not answer; see $log, then run 'scripts/dockerd.sh stop' and start it again"
  fi
  mountpoint -q /sys/fs/cgroup || mount -t cgroup2 cgroup2 /sys/fs/cgroup ||
    fail "no cgroup file system is mounted and none can be: this machine (an unprivileged container?) cannot run Docker"
  # Docker takes the dead, not yet reaped containerd of a killed daemon for a live one and waits for it in vain.
  wait_for 10 containerd_settled || true
  rm -f "$pidfile"
  if [ -e "$log" ]; then mv "$log" "$log.before"; fi
  say "starting dockerd (log: $log)"
  launch
  wait_for "$START_S" ready_or_gone || { kill "$launched" 2>/dev/null; give_up "did not answer within $START_S s"; }
  answers || give_up "ended at once"
  disown "$launched" 2>/dev/null || true
}

gone() { ! our_pid >/dev/null; }

stop() {
  local pid
  pid=$(our_pid) || { say "no daemon of Belayer's runs"; return; }
  kill -TERM "$pid"
  wait_for "$STOP_S" gone || fail "dockerd (process $pid) did not end within $STOP_S s; see $log"
  rm -f "$pidfile"
}

case ${1:-} in
  start) start ;;
  stop) stop ;;
  status) if answers; then describe; else echo "no Docker daemon answers"; exit 1; fi ;;
  *) fail "usage: dockerd.sh start|stop|status" ;;
esac
