#!/usr/bin/env bash
# Everything that needs a GPU, in one call; results go to $OUT. Arguments: tests, bench, sanitize.
# The package need not be installed: only what its imports need.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-/tmp/ouro-gpu}
mkdir -p "$out"
if [ -d .whl ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target /tmp/site .whl/*.whl
fi
export PYTHONPATH="/tmp/site:$PWD" PYTHONUNBUFFERED=1
[ -e ouro_batch/kernels ] || ln -s ../kernels ouro_batch/kernels

for step in "$@"; do
    echo "== $step"
    case "$step" in
    tests) timeout 500 python3 -m pytest -q -m gpu tests/kernels tests/gpu --durations=15 \
        2>&1 | tee "$out/tests.log" | tail -60 ;;
    sanitize) timeout 300 compute-sanitizer --tool memcheck python3 -m pytest -q -m gpu -k small \
        tests/kernels 2>&1 | tee "$out/sanitize.log" | tail -20 ;;
    bench) timeout 500 python3 -m ouro_batch bench --workload table --output "$out/bench.json" \
        2>&1 | tee "$out/bench.log" | tail -60 ;;
    *) echo "unknown step $step" ;;
    esac
done
