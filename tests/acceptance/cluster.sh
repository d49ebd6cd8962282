# Sourced by the scripts beside it: starts a local cluster, reads what it says of itself, stops it.
#
# Wants `binary`, `nodes` and `python`. Gives `dir`, `failed`, `clients`, `field NAME` and
# `stop_cluster`. Whatever happens, the cluster and `dir` are gone when the script ends; after a
# failure the brokers' last words are printed.

[ -x "$binary" ] || { echo "no program at $binary; build it or name one with --binary" >&2; exit 2; }
dir="$(mktemp -d)"
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

"$binary" cluster up --nodes "$nodes" --shards 6 --dir "$dir/cluster" --json >"$dir/up.json" 2>"$dir/up.err" &
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

# Stops the cluster; counts it as a failure when it does not stop in order.
stop_cluster() {
    kill -TERM "$up_pid"
    if ! wait "$up_pid"; then
        echo "the cluster did not stop in order" >&2
        failed=1
    fi
    up_pid=""
}
