# Sourced by run1.sh and run2.sh, in the repository's root: `out`, `most` seconds, and the packages of this checkout under
# the names that an installation gives them.
set -u
mkdir -p "$out"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false ODC_SUITE_TESTS=$out/tests.jsonl
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
ln -s "$PWD/kernels" "$site/odc_kernels"
ln -s "$PWD/bench" "$site/odc_bench"
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH}

left() { echo $((most - SECONDS)); }
first() { # seconds, sections: their numbers
    local seconds=$1
    shift
    timeout -k 5 $((seconds + 5)) python3 -m bench.suites.gpu.first "$out" --seconds "$seconds" --only "$@" > /dev/null 2>> "$out/first.log"
    echo "== $SECONDS s: $*, rc $?"
}
tests() { # seconds, workers, ids
    local seconds=$1 workers=$2
    shift 2
    timeout -k 5 "$seconds" python3 -m pytest -q -p bench.suites.gpu.outcomes -p no:cacheprovider -W default -m gpu -n "$workers" \
        --timeout 45 --timeout-method thread --maxschedchunk 1 "$@" >> "$out/tests.log" 2>&1
    echo "== $SECONDS s: tests, rc $?"
    tail -n 3 "$out/tests.log"
}
report() { python3 -m bench.suites.gpu.first "$out" --report; }
