#!/usr/bin/env bash
# Starts a local cluster and drives each of its brokers with the published Python client.
#
#   tests/acceptance/run.sh [--binary FILE] [--python FILE] [--nodes N] [CHECK-SCRIPT FLAGS...]
#
# Every broker is driven once: one of them owns the stream, the others forward to it. Ends with
# status 0 when every check passed on every broker and the cluster stopped in order.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
binary="$root/target/release/felix-uring"
python="python3"
nodes=2
while [ $# -gt 0 ]; do
    case "$1" in
        --binary) binary="$2"; shift 2 ;;
        --python) python="$2"; shift 2 ;;
        --nodes) nodes="$2"; shift 2 ;;
        *) break ;;
    esac
done

[ -x "$binary" ] || { echo "no program at $binary; build it or name one with --binary" >&2; exit 2; }
dir="$(mktemp -d "${TMPDIR:-/tmp}/felix-acceptance.XXXXXX")"
up_pid=""
failed=0

finish() {
    local status=$?
    if [ -n "$up_pid" ] && kill -0 "$up_pid" 2>/dev/null; then
        kill -TERM "$up_pid" 2>/dev/null || true
        wait "$up_pid" || true
    fi
    if [ "$status" -ne 0 ]; then
        for log in "$dir"/cluster/node-*/broker.log; do
            [ -f "$log" ] && { echo "--- $log"; tail -n 40 "$log"; }
        done
        echo "--- cluster"; tail -n 20 "$dir/up.err" 2>/dev/null || true
    fi
    rm -rf "$dir"
    exit "$status"
}
trap finish EXIT

"$binary" cluster up --nodes "$nodes" --dir "$dir/cluster" --json >"$dir/up.json" 2>"$dir/up.err" &
up_pid=$!
for _ in $(seq 1 900); do
    [ -s "$dir/up.json" ] && break
    kill -0 "$up_pid" 2>/dev/null || { echo "the cluster did not start" >&2; exit 1; }
    sleep 0.1
done
[ -s "$dir/up.json" ] || { echo "the cluster was not ready in time" >&2; exit 1; }

field() {
    "$python" -c 'import json,sys; print(json.loads(open(sys.argv[1]).readline())[sys.argv[2]])' "$dir/up.json" "$1"
}
mapfile -t clients < <("$python" -c '
import json, sys
for node in json.loads(open(sys.argv[1]).readline())["nodes"]:
    print(node["client"])' "$dir/up.json")

for client in "${clients[@]}"; do
    echo "== broker $client"
    "$python" "$here/felix_client_smoke.py" --addr "$client" --ca "$(field ca)" \
        --tenant "$(field tenant)" --namespace "$(field namespace)" --stream "$(field stream)" \
        --cache "$(field cache)" --key-file "$(field signing_key)" "$@" || failed=1
done

kill -TERM "$up_pid"
if ! wait "$up_pid"; then
    echo "the cluster did not stop in order" >&2
    failed=1
fi
up_pid=""
exit "$failed"
