#!/usr/bin/env bash
# Drives a local cluster with the published command line, felixctl 0.6.2, as its users would.
#
#   tests/acceptance/felixctl.sh [--binary FILE] [--felixctl FILE] [--nodes N]
#
# Every command is given to every broker once: one of them owns the shards, the others forward or
# name it. Ends with status 0 when every answer was the one expected on every broker.
# Install it with: cargo install felixctl@0.6.2 --locked --ignore-rust-version
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
binary="$root/target/release/felix-uring"
felixctl="felixctl"
python="python3"
nodes=3
while [ $# -gt 0 ]; do
    case "$1" in
        --binary) binary="$2"; shift 2 ;;
        --felixctl) felixctl="$2"; shift 2 ;;
        --nodes) nodes="$2"; shift 2 ;;
        *) echo "unknown flag $1" >&2; exit 2 ;;
    esac
done
command -v "$felixctl" >/dev/null || { echo "no $felixctl; install it or name one with --felixctl" >&2; exit 2; }

. "$here/cluster.sh"

stream="$(field stream)"
cache="$(field cache)"
export FELIX_AUTH_TOKEN FELIX_AUTH_TENANT FELIX_NAMESPACE FELIX_CA_FILE FELIX_SERVER_NAME FELIX_CLI_CONFIG FELIX_BROKERS
FELIX_AUTH_TOKEN="$(field token)"
FELIX_AUTH_TENANT="$(field tenant)"
FELIX_NAMESPACE="$(field namespace)"
FELIX_CA_FILE="$(field ca)"
FELIX_SERVER_NAME=localhost
FELIX_CLI_CONFIG="$dir/config.toml"

# Payloads of the bench commands hold null bytes, which a shell variable cannot.
ctl() { timeout 60 "$felixctl" "$@" 2>&1 | tr -d '\000'; }

# ok NAME PATTERN COMMAND...: the command must end with status 0 and print what matches.
ok() {
    local name="$1" pattern="$2" out status=0
    shift 2
    out="$(ctl "$@")" || status=$?
    if [ "$status" -eq 0 ] && grep -Eq -- "$pattern" <<<"$out"; then
        echo "ok      $name"
    else
        echo "FAILED  $name: status $status, expected /$pattern/ of: felixctl $*"
        printf '%s\n' "$out" | head -n 20
        failed=1
    fi
}

# not_ok NAME PATTERN COMMAND...: the command must fail and print what matches.
not_ok() {
    local name="$1" pattern="$2" out status=0
    shift 2
    out="$(ctl "$@")" || status=$?
    if [ "$status" -ne 0 ] && grep -Eqi -- "$pattern" <<<"$out"; then
        echo "ok      $name"
    else
        echo "FAILED  $name: status $status, expected a refusal /$pattern/ of: felixctl $*"
        printf '%s\n' "$out" | head -n 20
        failed=1
    fi
}

for client in "${clients[@]}"; do
    echo "--- $client"
    FELIX_BROKERS="$client"
    group="workers-${client##*:}"
    key="key-${client##*:}"

    ok "topology of a stream" "$stream" topology "$stream"
    ok "topology of a cache" "$cache" topology --cache "$cache"
    not_ok "topology of a stream that is not there" "knows no stream" topology absent

    ok "group create" "." group create "$stream" "$group" --from latest
    ok "pub three" "." pub "$stream" hello --count 3
    ok "pub with a key" "." pub "$stream" keyed --key k
    ok "pub without an answer" "" pub "$stream" unacked --ack none
    ok "sub from earliest" "hello" sub "$stream" --from earliest --count 3
    ok "sub from an offset, as JSON" "offset" sub "$stream" --from 0 --count 1 --json

    not_ok "cache get of what is not there" "" cache get "$cache" "absent-$key"
    ok "cache put" "" cache put "$cache" "$key" value
    ok "cache get" "value" cache get "$cache" "$key"
    ok "cache del" "" cache del "$cache" "$key"
    ok "counter add" "5" counter add "$cache" "$key" 5
    ok "counter add below zero" "-?2" counter add "$cache" "$key" -- -7
    ok "counter get" "-2" counter get "$cache" "$key"

    claims="$(ctl group poll "$stream" "$group" --max 5 --wait-ms 5000 | grep -Eo '0:[0-9]+:[0-9]+' | sort -t: -k2n -u || true)"
    mapfile -t claim <<<"$claims"
    if [ "${#claim[@]}" -eq 5 ]; then echo "ok      group poll: ${claim[*]}"; else
        echo "FAILED  group poll: ${claim[*]}"; failed=1; continue
    fi
    ok "group ack" "" group ack "$stream" "$group" "${claim[0]}" "${claim[1]}"
    ok "group nack" "" group nack "$stream" "$group" "${claim[2]}"
    not_ok "group nack of a claim that is over" "claim" group nack "$stream" "$group" "${claim[2]}"
    ok "group poll again" "${claim[2]%:*}:2" group poll "$stream" "$group" --wait-ms 5000
    ok "group extend" "" group extend "$stream" "$group" "${claim[2]%:*}:2" --for-ms 60000
    ok "group ack of the second delivery" "" group ack "$stream" "$group" "${claim[2]%:*}:2"
    offset="${claim[3]%:*}"
    ok "dead-letters add" "" group dead-letters add "$stream" "$group" "$offset"
    ok "dead-letters ls" "${offset#*:}" group dead-letters ls "$stream" "$group"
    ok "dead-letters redrive" "" group dead-letters redrive "$stream" "$group" "$offset"
    ok "group poll of the redriven" "$offset:1" group poll "$stream" "$group" --wait-ms 5000
    ok "dead-letters add again" "" group dead-letters add "$stream" "$group" "$offset"
    ok "dead-letters discard" "" group dead-letters discard "$stream" "$group" "$offset" --yes
    ok "group describe" "." group describe "$stream" "$group"
    ok "group seek" "" group seek "$stream" "$group" earliest --yes
    ok "group poll from the start" "0:0:1" group poll "$stream" "$group" --wait-ms 5000
    ok "group rm" "" group rm "$stream" "$group" --yes

    ok "bench ingest" "P99" bench ingest "$stream" --total 5000
    ok "bench latency" "P99" bench latency "$stream" --total 500
    ok "bench fanout" "." bench fanout "$stream" --total 500
    ok "bench cache" "P99" bench cache "$cache" --total 1000
done

stop_cluster
if [ "$failed" -ne 0 ]; then echo "felixctl: some answers were not the ones expected"; exit 1; fi
echo "felixctl: all answers were the ones expected on ${#clients[@]} brokers"
