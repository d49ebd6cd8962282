#!/usr/bin/env bash
# Every shape of docs/benchmarks.md in one session, recorded under bench/runs. About 15 minutes on an
# otherwise idle machine: whatever else runs shows in the figures.
#
#   bench/shapes.sh                 all of them
#   ROUNDS=3 SECONDS_EACH=2 bench/shapes.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rounds=${ROUNDS:-5}
seconds=${SECONDS_EACH:-4}
cargo build --release -p felix-bench
bench=target/release/felix-bench

run() {
    local name=$1
    shift
    echo "== $name"
    "$bench" forward --rounds "$rounds" --duration "${seconds}s" --warmup 1s --record "$name" "$@"
}

# The main job, and the same with smaller and larger records, beside the relay probe.
run forward-1k-b64
run forward-100-b64 --payload-bytes 100
run forward-16k-b16 --payload-bytes 16K --batch 16 --in-flight 8

# One outstanding record, beside the relay probe: what the path itself takes.
run forward-1k-1x1 --batch 1 --connections 1 --in-flight 1
run direct-1k-1x1 --direct --batch 1 --connections 1 --in-flight 1

# Shapes other durable brokers are measured with, sent to the owner and forwarded to it.
for mode in direct forward; do
    flag=""
    [ "$mode" = direct ] && flag=--direct
    run "$mode-100-1x1" $flag --no-probe --payload-bytes 100 --batch 1 --connections 1 --in-flight 1
    run "$mode-100-16x1" $flag --no-probe --payload-bytes 100 --batch 1 --connections 16 --in-flight 1
    run "$mode-100-8x64" $flag --no-probe --payload-bytes 100 --batch 1 --connections 8 --in-flight 64
    run "$mode-1k-b100" $flag --no-probe --batch 100 --connections 4 --in-flight 8
    run "$mode-16k-b100" $flag --no-probe --payload-bytes 16K --batch 100 --connections 4 --in-flight 2
done

"$bench" quic --rounds "$rounds"
"$bench" quic --rounds "$rounds" --spin-us 0
"$bench" append --rounds "$rounds"
"$bench" append --rounds "$rounds" --shards 1 --payload-bytes 1K --outstanding 1
"$bench" limits
