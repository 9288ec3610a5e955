#!/usr/bin/env bash
# Measures everything about engines that docs/gpu.md reports, on the machine with the GPU, in stages:
#
#   scripts/gpu_measure.sh OUT_DIR [--tp] [--device cuda:N|cpu] [--shape NAME]... [--each N] [--quick] [--only PATTERN] [--plan]
#
# Each stage is one run of a benchmark into OUT_DIR/STAGE/ (its JSON is written as it goes) and is marked done there; run
# again with the same OUT_DIR, only what is not done is run. OUT_DIR/summary.json has every stage's last line.
#   --plan           only says what would be run, and for how long
#   --tp             also with two tensor parallel ranks, on the device and the next one (NCCL, no NVLink multicast)
#   --shape NAME     4b, 32b (both without it) or tiny
#   --each N         kills of each kind (20 without it): fewer make shorter stages
#   --quick          one kill of each kind, one round: to try the script out, as with --device cpu --shape tiny
#   --only PATTERN   only the stages whose names match the shell pattern
# PYTHON names the interpreter that has SGLang 0.5.17 (python3 without it; PYTHONPATH as scripts/gpu_site.sh says).
# Ends with 0 when all is done, 1 when a stage failed (the others are run all the same), 130 when it was interrupted.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$REPO"

out='' device=cuda:0 tp=no quick=no plan=no each=20 only='*' shapes=()
while [ $# -gt 0 ]; do
  case $1 in
    --tp) tp=yes ;;
    --quick) quick=yes ;;
    --plan) plan=yes ;;
    --device | --shape | --each | --only)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in --device) device=$2 ;; --shape) shapes+=("$2") ;; --each) each=$2 ;; --only) only=$2 ;; esac
      shift ;;
    -*) fail "unknown option $1; see the head of scripts/gpu_measure.sh" ;;
    *) [ -z "$out" ] || fail "one OUT_DIR, not $out and $1"; out=$1 ;;
  esac
  shift
done
[ -n "$out" ] || fail "usage: scripts/gpu_measure.sh OUT_DIR [--tp] [--device cuda:N|cpu] [--shape NAME]... [--each N] [--quick] [--only PATTERN] [--plan]"
[ ${#shapes[@]} -gt 0 ] || shapes=(4b 32b)
for shape in "${shapes[@]}"; do [[ $shape =~ ^(tiny|4b|32b)$ ]] || fail "unknown shape $shape; there are tiny, 4b and 32b"; done
[[ $each =~ ^[1-9][0-9]*$ ]] || fail "--each $each is no number of kills"
[[ $device =~ ^(cpu|cuda:[0-9]+)$ ]] || fail "unknown device $device; cpu or cuda:N"
python=${PYTHON:-python3}
out=$(realpath -m "$out")
export HF_HUB_OFFLINE=1 SGLANG_DISABLE_VERSION_CHECK=1 PYTHONUNBUFFERED=1
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$REPO
[ "$device" != cpu ] || export SGLANG_USE_CPU_ENGINE=1
[ $tp = no ] || export TORCHDYNAMO_DISABLE=1

# --- the plan: parallel lists of names, estimated seconds, commands ------------------------------------------------------

names=() estimates=() commands=()
stage() { # NAME SECONDS COMMAND...
  # shellcheck disable=SC2053  # the pattern is one
  [[ $1 == $only ]] || return 0
  names+=("$1") estimates+=("$2")
  shift 2
  commands+=("$(printf '%q ' "$@")")
}
handover() { # NAME SECONDS SHAPE LOAD ARGUMENT...: the budget is twice the estimate
  local name=$1 seconds=$2 shape=$3 load=$4
  shift 4
  stage "$name" "$seconds" "$python" -m benchmarks.handover --device "$device" --shape "$shape" --load "$load" \
    --tokens "$tokens" --budget-s $((2 * seconds + 300)) --start-timeout-s 600 --out "$out/$name" "$@"
}

rounds=5 equal=4
[ $quick = no ] || each=1 rounds=1 equal=1
tokens=128 start_s=60 kill_s=12 wave=12
for shape in "${shapes[@]}"; do
  many=64x2048 loads=(1x2048 1x8192 16x2048 16x8192 64x2048 64x8192)
  case $shape in
    32b) loads=(1x2048 1x8192 16x2048 16x8192 64x2048) start_s=100 kill_s=15 ;; # 64 of 8k would take 137 GB
    tiny) many=4x64 loads=(1x64 4x64) tokens=1200 start_s=60 kill_s=30 wave=2 ;;
  esac
  [ $quick = no ] || loads=("$many")
  for load in "${loads[@]}"; do
    handover "kills-$shape-$load" $((2 * start_s + 3 * each * kill_s)) "$shape" "$load" --stage engine,kills --overlap \
      --wave $wave --kills "late:$load*$each,early:$load*$each,refill:$load*$each"
  done
  handover "zombie-$shape" $((2 * start_s + 60)) "$shape" "$many" --stage engine,kills --overlap --kills "zombie:$many*$equal"
  apart=() update=pair
  [ "$shape" != 32b ] || apart=(--apart) update=engine,update,plain # two engines of 64 GB do not fit on one GPU
  handover "throughput-$shape" $((3 * start_s + 60 * rounds)) "$shape" "$many" --stage everything --kills '' \
    --rounds "$rounds" "${apart[@]}"
  handover "update-$shape" $((4 * start_s + 60)) "$shape" "$many" --stage "$update" --kills '' --plain-s $((2 * start_s))
  starts=plain,cache flag=(--deterministic)
  [ "$device" != cpu ] || starts=plain flag=() # SGLang's weight cache and batch-invariant kernels are for GPUs; fp32 is equal
  handover "start-$shape" $((4 * start_s)) "$shape" "$many" --stage "$starts" --kills '' --plain-s $((2 * start_s))
  handover "equal-$shape" $((3 * start_s + 60)) "$shape" "$many" --stage engine,kills --overlap "${flag[@]}" \
    --kills "late:$many*$equal,early:$many*$equal"
  if [ $tp = yes ]; then
    [ "$shape" != 32b ] || many=64x8192
    handover "tp2-$shape" $((4 * start_s + 2 * each * kill_s)) "$shape" "$many" --tp 2 --stage engine,kills,steady,plain \
      --overlap --wave $((each < 8 ? 2 * each : 8)) --kills "late:$many*$each,early:$many*$each" --plain-s $((2 * start_s))
  fi
done
if [ $tp = yes ] && [ "$device" != cpu ]; then
  handover update-nccl 400 4b 64x2048 --stage engine,update,plain --kills '' --plain-s 150 \
    --trainer-device "cuda:$((${device#cuda:} + 1))"
fi
faults=() times=3
[ $quick = no ] || faults=("SIGKILL of the engine process") times=1
stage detection $((40 * times * (8 - 7 * (times == 1)))) env BELAYER_SGLANG_PYTHON="$(command -v "$python")" \
  "$python" -m benchmarks.detection --device "$device" --folder "$out/detection/work" --out "$out/detection/detection.json" \
  --rounds $times "${faults[@]}"

total=0
for at in "${!names[@]}"; do
  state="about $((estimates[at] / 60 + 1)) min"
  if [ -e "$out/${names[at]}/done" ]; then state="done"; else total=$((total + estimates[at])); fi
  say "$(printf '%-22s %s' "${names[at]}" "$state")"
done
say "about $((total / 60 + 1)) minutes are left"
[ $plan = no ] || exit 0

"$python" -c 'import aiohttp, redis, structlog, typer; import sglang; from belayer.journal.embedded import find_server as f; f()' ||
  fail "$python lacks what the benchmarks need (above); set PYTHON, PYTHONPATH (scripts/gpu_site.sh) and have redis-server"

# --- the runs --------------------------------------------------------------------------------------------------------

job=''
interrupted() { # the benchmark ends its engines itself, and they end with it
  trap '' INT TERM
  if [ -n "$job" ]; then kill -INT "$job" 2>/dev/null || true; wait "$job" 2>/dev/null || true; fi
  say "interrupted; run the same again to go on"
  exit 130
}
trap interrupted INT TERM

failed=()
for at in "${!names[@]}"; do
  folder=$out/${names[at]}
  [ ! -e "$folder/done" ] || continue
  rm -rf --one-file-system "${folder:?}"
  mkdir -p "$folder"
  printf '%s\n' "${commands[at]}" >"$folder/command"
  say "${names[at]} (about $((estimates[at] / 60 + 1)) min; $folder/run.log)"
  set -m # a job of its own, which hears no Ctrl-C but ours
  eval "exec ${commands[at]}" >"$folder/run.log" 2>&1 </dev/null &
  job=$!
  set +m
  status=0
  wait "$job" || status=$?
  job=''
  if [ $status = 0 ] && "$python" -m benchmarks.gpu_summary "$folder" >&2; then touch "$folder/done"; else failed+=("${names[at]}"); fi
  "$python" -m benchmarks.gpu_summary --all "$out" >"$out/summary.json.new" && mv "$out/summary.json.new" "$out/summary.json"
done
say "$out/summary.json has what was found"
[ ${#failed[@]} = 0 ] || { say "not done: ${failed[*]}; their run.log and handover.json say why; run the same again to retry"; exit 1; }
