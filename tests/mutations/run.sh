#!/usr/bin/env bash
# Breaks the machines one line at a time and expects the simulator, or a test the case names, to notice.
#
#   tests/mutations/run.sh            every case
#   tests/mutations/run.sh NAME...    some of them
#
# SEEDS (default 3000) bounds the seeds a case may take; it ends earlier, once FAILURES (default 25)
# of them have failed. A case is caught when an invariant it names is among those noticed; one that names a
# test (a line `test ARGUMENTS OF CARGO TEST`) when that test builds and fails. That it passes without the
# change is the test suite's matter. The copy of the tree and its build live in MUTATION_DIR (default target/mutations) and are kept, so that a
# case costs one small incremental build; CARGO_TARGET_DIR shares the dependencies of another build.
# Everything is told on standard output, and at the end which invariants were noticed at all.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly ROOT="$PWD"
readonly WORK="${MUTATION_DIR:-$ROOT/target/mutations}"
readonly SEEDS="${SEEDS:-3000}"
readonly FAILURES="${FAILURES:-25}"
# Little to optimise pays: most cases fail within some dozens of seeds.
export CARGO_PROFILE_DEV_OPT_LEVEL="${CARGO_PROFILE_DEV_OPT_LEVEL:-1}"
export CARGO_PROFILE_DEV_DEBUG="${CARGO_PROFILE_DEV_DEBUG:-0}"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$WORK/target}"

caught=()
missed=()
broken=()
noticed=()

copy_tree() {
    rm -rf "$WORK/tree"
    mkdir -p "$WORK/tree"
    tar -C "$ROOT" --exclude=./target --exclude='./target-*' --exclude=./.git -cf - . | tar -C "$WORK/tree" -xf -
    # What the case before has changed is as it was, with a time that the build takes for old.
    if [ -f "$WORK/changed" ]; then
        (cd "$WORK/tree" && xargs -r touch -c <"$WORK/changed")
    fi
}

# The test a case names, if any.
test_of() {
    sed -n "/^case $1\$/,/^file /s/^test //p" "$ROOT/tests/mutations/cases"
}

# Whether the case's test, which must build, fails.
run_test() {
    local name="$1" output
    local -a arguments
    read -ra arguments <<<"$(test_of "$name")"
    if ! (cd "$WORK/tree" && cargo test --quiet --no-run "${arguments[@]}") >"$WORK/build" 2>&1; then
        echo "$name: DOES NOT BUILD"
        broken+=("$name")
        return
    fi
    output="$(cd "$WORK/tree" && timeout 600 cargo test "${arguments[@]}" 2>&1)"
    local failed
    failed="$(sed -n 's/^test \(.*\) \.\.\. FAILED$/\1/p' <<<"$output" | sort -u | head -n 3 | tr '\n' ' ')"
    if [ -n "$failed" ]; then
        echo "$name: caught by $failed"
        caught+=("$name")
        mapfile -t -O "${#noticed[@]}" noticed < <(named "$name")
    else
        echo "$name: SURVIVED $(test_of "$name"): $(tail -n 3 <<<"$output" | tr '\n' ' ')"
        missed+=("$name")
    fi
}

# The invariants a case names, one a line.
named() {
    sed -n "/^case $1\$/,/^file /s/^invariants //p" "$ROOT/tests/mutations/cases" | tr ' ' '\n'
}

run_case() {
    local name="$1"
    copy_tree
    if ! python3 "$ROOT/tests/mutations/apply.py" "$ROOT/tests/mutations/cases" "$name" "$WORK/tree" >"$WORK/changed"; then
        echo "$name: DOES NOT APPLY"
        broken+=("$name")
        return
    fi
    if [ -n "$(test_of "$name")" ]; then
        run_test "$name"
        return
    fi
    if ! (cd "$WORK/tree" && cargo build --quiet --no-default-features --bin sim); then
        echo "$name: DOES NOT BUILD"
        broken+=("$name")
        return
    fi
    local output found counts
    output="$("$CARGO_TARGET_DIR/debug/sim" --no-kept --failures "$FAILURES" --seeds "$SEEDS")"
    found="$(sed -n 's/^FAILED \(I[0-9]*\|panic\):.*/\1/p' <<<"$output")"
    counts="$(sort <<<"$found" | uniq -c | sort -rn | awk '{printf "%s%s x%s", sep, $2, $1; sep=", "}')"
    local seeds
    seeds="$(tail -n 1 <<<"$output" | sed -n 's/.*"failed":\([0-9]*\).*"passed":\([0-9]*\).*/\1+\2/p')"
    mapfile -t -O "${#noticed[@]}" noticed < <(sort -u <<<"$found")
    if [ -z "$found" ]; then
        echo "$name: SURVIVED $SEEDS seeds"
        missed+=("$name")
    elif named "$name" | grep -qxFf <(sort -u <<<"$found"); then
        echo "$name: caught by $counts (failed+passed seeds: $seeds)"
        caught+=("$name")
    else
        echo "$name: NOTICED ONLY BY $counts, not by $(named "$name" | tr '\n' ' ')"
        missed+=("$name")
    fi
    if [ -n "${SHOW:-}" ]; then
        grep -m3 '^FAILED' <<<"$output" | cut -c1-240
    fi
}

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
    mapfile -t names < <(sed -n 's/^case //p' "$ROOT/tests/mutations/cases")
fi
for name in "${names[@]}"; do
    run_case "$name"
done
echo "noticed: $(printf '%s\n' "${noticed[@]}" | sort -Vu | grep . | tr '\n' ' ')"
echo "caught ${#caught[@]}, missed ${#missed[@]} (${missed[*]:-}), not run ${#broken[@]} (${broken[*]:-})"
[ ${#missed[@]} -eq 0 ] && [ ${#broken[@]} -eq 0 ]
