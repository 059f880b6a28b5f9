#!/usr/bin/env bash
# The second run, 4 minutes, after what the first one found was fixed: run2.sh FOLDER SECONDS [ids of tests that failed]
out=${1:?a folder for results} most=${2:?seconds}
shift 2
source bench/suites/gpu/env.sh
[ $# -gt 0 ] && tests 50 8 "$@"
first $(($(left) - 80)) "group 4096+8x512" rows long "group 1024+8x1024"
tests "$(left)" 14 tests/kernels tests/gpu/test_cuda_tree.py tests/gpu/test_cuda_split.py tests/gpu/test_cuda_engine.py
report
