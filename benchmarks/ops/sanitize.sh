#!/usr/bin/env bash
# compute-sanitizer over our kernels (C++ ones, PyTorch's, are left out) on conformance's small cases:
#   benchmarks/ops/sanitize.sh memcheck|racecheck|synccheck|initcheck [arguments of conformance.py]
# Run benchmarks/ops/conformance.py --cases small first: it compiles. Exit status 9 if the tool finds an error.
set -euo pipefail
cd "$(dirname "$0")/../.."
tool=$1
shift
# Every tensor an allocation of its own, so that a step over its end is seen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
exec compute-sanitizer --tool "$tool" --kernel-name-exclude kns=_ZN --print-limit 10000 --error-exitcode 9 \
    "${PYTHON:-python3}" benchmarks/ops/conformance.py --cases small --jobs 1 "$@"
