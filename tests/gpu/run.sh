#!/usr/bin/env bash
# Everything that needs a GPU, in one call; results go to $OUT. Arguments: tests, bench, sanitize,
# validate (the sample model), large and quick (random weights of Ouro-1.4B's shape, level full and
# quick; large takes a whole call of 10 minutes), invariant (what batch invariance costs), start
# (seconds to the first record).
# The package need not be installed: only what its imports need (so no pytest-xdist: no addopts).
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
    tests) timeout 500 python3 -m pytest -o addopts= -q -m gpu tests/kernels tests/gpu --durations=15 \
        2>&1 | tee "$out/tests.log" | tail -60 ;;
    sanitize) timeout 300 compute-sanitizer --tool memcheck python3 -m pytest -o addopts= -q -m gpu -k small \
        tests/kernels 2>&1 | tee "$out/sanitize.log" | tail -20 ;;
    bench) timeout 500 python3 -m ouro_batch bench --workload table --output "$out/bench.json" \
        2>&1 | tee "$out/bench.log" | tail -60 ;;
    validate) timeout 400 python3 -m ouro_batch validate --model samples/tiny-ouro \
        --prompts samples/eval.jsonl --level full --output "$out/tiny-ouro-h200.json" \
        2>&1 | tee "$out/validate.log" ;;
    large) timeout 100 python3 -m tests.gpu.random_checkpoint /tmp/ouro-1.4b-random &&
        timeout 580 python3 -m ouro_batch validate --model /tmp/ouro-1.4b-random --level full \
            --output "$out/random-1.4b-h200.json" 2>&1 | tee "$out/large.log" ;;
    quick) timeout 100 python3 -m tests.gpu.random_checkpoint /tmp/ouro-1.4b-random &&
        timeout 250 python3 -m ouro_batch validate --model /tmp/ouro-1.4b-random \
            --output "$out/random-1.4b-quick-h200.json" 2>&1 | tee "$out/quick.log" ;;
    invariant) timeout 300 python3 -m ouro_batch bench --shape ouro-1.4b -w 128x1024/128 \
        --compare batch-invariant=false batch-invariant=true \
        --output "$out/batch-invariant.json" 2>&1 | tee "$out/invariant.log" ;;
    start) timeout 100 python3 -m tests.gpu.random_checkpoint /tmp/ouro-1.4b-random &&
        timeout 200 python3 -m tests.gpu.startup /tmp/ouro-1.4b-random --kernels \
            --output "$out/start.json" 2>&1 | tee "$out/start.log" | grep -v KERNEL ;;
    *) echo "unknown step $step" ;;
    esac
done
