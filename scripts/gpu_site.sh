#!/usr/bin/env bash
# Builds OUT: an archive of a site-packages folder with SGLang and the part of its dependencies that a GPU machine
# without a network lacks (x86-64, Python 3.12, PyTorch 2.11 with CUDA 13). About 45 MB, 2 minutes, needs a registry.
#
#   scripts/gpu_site.sh OUT.tar.xz [EXTRA-REQUIREMENT ...]
#
# There: mkdir SITE && tar -C SITE -xJf OUT.tar.xz; export PYTHONPATH=SITE HF_HUB_OFFLINE=1
#
# Left out to stay small: FlashAttention-3 and the Blackwell kernels of sglang-kernel, FlashInfer's CUDA sources,
# CUTLASS. So SGLang needs: --attention-backend triton --sampling-backend pytorch --grammar-backend none
# --disable-prefill-cuda-graph (benchmarks/handover.py passes them).
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ $# -ge 1 ] || fail "which archive? usage: scripts/gpu_site.sh OUT.tar.xz [EXTRA-REQUIREMENT ...]"
out=$(realpath -m "$1"); shift
work=$(mktemp -d)
trap 'rm -rf "${work:?}"' EXIT

platforms=(linux_x86_64 any manylinux2014_x86_64 manylinux2010_x86_64 manylinux1_x86_64)
for minor in 39 35 34 31 28 27 26 24 17 12 5; do platforms+=("manylinux_2_${minor}_x86_64"); done

say "fetching wheels for Python 3.12"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]/#/--platform=}" \
  --dest "$work/wheels" --requirement "$SCRIPTS/gpu_site.txt" "$@" 2>"$work/log" ||
  { grep -v '^WARNING' "$work/log" | tail -n 5 >&2; fail "pip could not fetch the wheels (above: why)"; }

mkdir "$work/site"
for wheel in "$work"/wheels/*.whl; do
  skip=()
  case ${wheel##*/} in
    sglang_kernel*) skip=('sgl_kernel/flash_ops*' 'sgl_kernel/sm100/*' 'sgl_kernel/flashmla_ops*' 'sgl_kernel/infllm_ops*' 'sgl_kernel/testing/*') ;;
    sglang-*) skip=('sglang/multimodal_gen/*' '*/_core.cpython-*') ;;
    xgrammar*) skip=('xgrammar/lib/*.a') ;;
    flashinfer*) skip=('flashinfer/data/cccl/*' 'flashinfer/data/cutlass/*' 'flashinfer/data/spdlog/*') ;;
  esac
  python3 - "$wheel" "$work/site" "${skip[@]}" <<'UNPACK'
import fnmatch, sys, zipfile
wheel, site, *skip = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    names = [n for n in archive.namelist() if not any(fnmatch.fnmatch(n, pattern) for pattern in skip)]
    archive.extractall(site, names)
UNPACK
done
strip --strip-unneeded "$work"/site/xgrammar/*.so

mkdir -p "$(dirname "$out")"
tar -C "$work/site" -cf - . | xz -4 -T0 >"$work/site.tar.xz"
mv "$work/site.tar.xz" "$out"
say "$out: $(du -h "$out" | cut -f1)"
