#!/usr/bin/env bash
# Starts a local cluster and drives each of its brokers with the published Python client.
#
#   tests/acceptance/run.sh [--binary FILE] [--python FILE] [--nodes N] [CHECK-SCRIPT FLAGS...]
#
# Every broker is driven once: one of them owns the stream, the others forward to it. Then a wide stream and
# a group are used by way of each of them, and the Python of docs/clients.md is run as it stands there. Ends with status 0 when every check passed on every
# broker and the cluster stopped in order.
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

. "$here/cluster.sh"

for client in "${clients[@]}"; do
    echo "== broker $client"
    "$python" "$here/felix_client_smoke.py" --addr "$client" --ca "$(field ca)" \
        --tenant "$(field tenant)" --namespace "$(field namespace)" --stream "$(field stream)" \
        --cache "$(field cache)" --key-file "$(field signing_key)" "$@" || failed=1
done

"$python" "$here/sharded.py" "$dir/up.json" || failed=1
sed -n '/^```python$/,/^```$/{/^```/d;p}' "$root/docs/clients.md" >"$dir/first.py"
if [ -s "$dir/first.py" ] && FELIX_CLUSTER="$dir/up.json" "$python" "$dir/first.py"; then
    echo "ok docs/clients.md"
else
    echo "FAIL docs/clients.md: its first publish and subscribe"
    failed=1
fi

stop_cluster
exit "$failed"
