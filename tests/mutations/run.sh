#!/usr/bin/env bash
# Breaks the machines one line at a time and expects the simulator to notice.
#
#   tests/mutations/run.sh            every case
#   tests/mutations/run.sh NAME...    some of them
#
# SEEDS (default 3000) bounds the seeds a case may take. The copy and its build live in
# MUTATION_DIR (default target/mutations) and are kept, so that a case costs one small build.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly ROOT="$PWD"
readonly WORK="${MUTATION_DIR:-$ROOT/target/mutations}"
readonly SEEDS="${SEEDS:-3000}"
export CARGO_PROFILE_DEV_OPT_LEVEL="${CARGO_PROFILE_DEV_OPT_LEVEL:-2}"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$WORK/target}"

caught=()
survived=()
broken=()

copy_tree() {
    mkdir -p "$WORK/tree"
    tar -C "$ROOT" --exclude=./target --exclude='./target-*' --exclude=./.git -cf - . | tar -C "$WORK/tree" -xf -
}

run_case() {
    local name="$1"
    copy_tree
    if ! python3 "$ROOT/tests/mutations/apply.py" "$ROOT/tests/mutations/cases" "$name" "$WORK/tree"; then
        echo "$name: DOES NOT APPLY"
        broken+=("$name")
        return
    fi
    if ! (cd "$WORK/tree" && cargo build --quiet --no-default-features --bin sim); then
        echo "$name: DOES NOT BUILD"
        broken+=("$name")
        return
    fi
    local found
    found="$("$CARGO_TARGET_DIR/debug/sim" --no-kept --fail-fast --seeds "$SEEDS" | grep -m1 '^FAILED')"
    if [ -n "$found" ]; then
        echo "$name: caught: ${found:0:160}"
        caught+=("$name")
    else
        echo "$name: SURVIVED $SEEDS seeds"
        survived+=("$name")
    fi
}

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
    mapfile -t names < <(sed -n 's/^case //p' "$ROOT/tests/mutations/cases")
fi
for name in "${names[@]}"; do
    run_case "$name"
done
echo "caught ${#caught[@]}, survived ${#survived[@]} (${survived[*]:-}), not run ${#broken[@]} (${broken[*]:-})"
[ ${#survived[@]} -eq 0 ] && [ ${#broken[@]} -eq 0 ]
