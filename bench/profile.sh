#!/usr/bin/env bash
# Where the CPU time of a forwarded record goes: a load at a fixed rate, both brokers sampled by perf, and a
# table of microseconds a record by part of the broker. Needs perf, python3, and llvm-symbolizer or addr2line.
#
#   bench/profile.sh                          100,000 records of 100 B a second in batches of 64
#   RATE=50000 BYTES=1024 BATCH=16 bench/profile.sh
#   BENCH=path/to/felix-bench bench/profile.sh     a binary that is there already, built with line tables
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rate=${RATE:-100000} bytes=${BYTES:-100} batch=${BATCH:-64} seconds=${SECONDS_SAMPLED:-10}
if [ -z "${BENCH:-}" ]; then
    cargo build --release -p felix-bench
    BENCH=target/release/felix-bench
fi
command -v perf >/dev/null || { echo "profile.sh: perf is needed (linux-perf on Debian)" >&2; exit 1; }
work=$(mktemp -d)
trap '[ -n "${KEEP:-}" ] || rm -rf "$work"' EXIT

# The sampled time lies inside the measured one.
"$BENCH" forward --no-probe --rounds 1 --warmup 2s --duration "$((seconds + 4))s" --rate "$rate" \
    --payload-bytes "$bytes" --batch "$batch" --json "$work/run.json" ${DATA_DIR:+--data-dir "$DATA_DIR"} \
    >"$work/run.txt" 2>"$work/run.err" &
load=$!
brokers=""
for _ in $(seq 100); do
    brokers=$(pgrep -P "$load" -d, || true)
    [ "$(tr ',' '\n' <<<"$brokers" | grep -c .)" -ge 2 ] && break
    sleep 0.1
done
sleep 4
# A clock and not a counter of cycles: virtual machines seldom have the latter.
perf record -q -e cpu-clock -F 1999 -g -o "$work/perf.data" -p "$brokers" -- sleep "$seconds" >/dev/null
wait "$load" || { cat "$work/run.txt" "$work/run.err" >&2; exit 1; }
cat "$work/run.txt"
perf script -i "$work/perf.data" -F pid,ip,sym,dso --no-inline 2>/dev/null >"$work/samples.txt"
python3 bench/profile.py "$work/run.json" "$work/samples.txt" "$BENCH" "$brokers"
