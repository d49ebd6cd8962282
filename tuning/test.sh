#!/bin/sh
# Tests tune.sh on made-up hosts, and the files beside it as far as the tools here allow.
# Exit status 0 when everything holds. Needs no privilege and touches nothing outside a temporary
# directory.

set -u
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
shell=sh

fail() {
    echo "FAIL: $*"
    failures=$((failures + 1))
}

put() {
    mkdir -p "$(dirname "$host/$1")"
    printf '%s\n' "$2" >"$host/$1"
}

# The value of a knob of the made-up host.
get() {
    cat "$host/$1"
}

expect() {
    [ "$(get "$1")" = "$2" ] || fail "$shell: $1 is '$(get "$1")', expected '$2'"
}

says() {
    grep -qF -- "$1" "$work/out" || {
        fail "$shell: the output lacks '$1'"
        sed 's/^/    /' "$work/out"
    }
}

silent_about() {
    grep -qF -- "$1" "$work/out" && fail "$shell: the output must not have '$1'"
}

# run STATUS ARGUMENTS...
run() {
    want=$1
    shift
    "$shell" "$here/tune.sh" --root "$host" "$@" >"$work/out" 2>&1
    got=$?
    [ "$got" -eq "$want" ] || {
        fail "$shell: tune.sh $*: status $got, expected $want"
        sed 's/^/    /' "$work/out"
    }
}

# A host with four CPUs, an NVMe disk, a network card with two queues, and one interrupt more.
make_host() {
    host=$work/host
    rm -rf "$host"
    put sys/devices/system/cpu/online 0-3
    for cpu in 0 1 2 3; do
        put sys/devices/system/cpu/cpu$cpu/cpufreq/scaling_governor powersave
        put sys/devices/system/cpu/cpu$cpu/cpuidle/state0/latency 0
        put sys/devices/system/cpu/cpu$cpu/cpuidle/state0/disable 0
        put sys/devices/system/cpu/cpu$cpu/cpuidle/state1/latency 133
        put sys/devices/system/cpu/cpu$cpu/cpuidle/state1/disable 0
    done
    put sys/kernel/mm/transparent_hugepage/enabled '[always] madvise never'
    put proc/sys/kernel/numa_balancing 1
    put proc/sys/net/core/rmem_max 212992
    put proc/sys/net/core/wmem_max 16777216
    put sys/block/nvme0n1/queue/scheduler '[mq-deadline] kyber none'
    put sys/block/nvme0n1/queue/nomerges 0
    put sys/block/nvme0n1/queue/rq_affinity 1
    put sys/block/nvme0n1/queue/write_cache 'write back'
    put sys/class/net/eth9/device/msi_irqs/30 msix
    put sys/class/net/eth9/device/msi_irqs/31 msix
    put sys/class/net/eth9/device/msi_irqs/32 msix
    for irq in 7 30 31 32; do
        put proc/irq/$irq/smp_affinity_list 0-3
    done
}

all='--cores 2-3 --device nvme0n1 --nic eth9'

test_dry_run_changes_nothing() {
    make_host
    cp -a "$host" "$work/before"
    # shellcheck disable=SC2086
    run 0 $all
    diff -r "$work/before" "$host" >/dev/null || fail "$shell: a dry run changed something"
    says 'would   /sys/block/nvme0n1/queue/scheduler: mq-deadline -> none'
    says 'would   /proc/sys/net/core/rmem_max: 212992 -> 8388608'
    says 'ok      /proc/sys/net/core/wmem_max = 16777216 (at least 8388608)'
    says 'absent  /proc/sys/net/core/netdev_max_backlog'
    says 'absent  /sys/kernel/mm/transparent_hugepage/defrag'
    says 'isolcpus=managed_irq,domain,2,3 irqaffinity=0,1'
    says 'nothing was changed'
    silent_about cpuidle
    silent_about 'cpu0/cpufreq'
    # shellcheck disable=SC2086
    run 0 --dry-run $all
    rm -rf "$work/before"
}

test_apply_and_revert() {
    make_host
    cp -a "$host" "$work/before"
    # shellcheck disable=SC2086
    run 0 --apply $all
    expect sys/devices/system/cpu/cpu2/cpufreq/scaling_governor performance
    expect sys/devices/system/cpu/cpu1/cpufreq/scaling_governor powersave
    expect sys/kernel/mm/transparent_hugepage/enabled madvise
    expect proc/sys/kernel/numa_balancing 0
    expect proc/sys/net/core/rmem_max 8388608
    expect proc/sys/net/core/wmem_max 16777216
    expect sys/block/nvme0n1/queue/scheduler none
    expect sys/block/nvme0n1/queue/write_cache 'write back'
    expect proc/irq/7/smp_affinity_list 0,1
    expect proc/irq/30/smp_affinity_list 0
    expect proc/irq/31/smp_affinity_list 1
    expect proc/irq/32/smp_affinity_list 0
    # A second run finds nothing to do; a third with other CPUs must not forget the originals.
    # shellcheck disable=SC2086
    run 0 --apply $all
    silent_about 'set  '
    run 0 --apply --cores 1-3 --device nvme0n1 --nic eth9
    expect proc/irq/31/smp_affinity_list 0
    twice=$(cut -f 1 "$host/run/felix-uring-tuning.state" | sort | uniq -d)
    [ -z "$twice" ] || fail "$shell: recorded more than once: $twice"
    run 0 --revert
    [ ! -e "$host/run/felix-uring-tuning.state" ] || fail "$shell: the state file stays after a revert"
    # The made-up host does not put the brackets back; a real one draws them itself.
    put sys/kernel/mm/transparent_hugepage/enabled '[always] madvise never'
    put sys/block/nvme0n1/queue/scheduler '[mq-deadline] kyber none'
    rmdir "$host/run"
    diff -r "$work/before" "$host" || fail "$shell: a revert did not restore everything"
    run 0 --revert
    says 'nothing to revert'
    rm -rf "$work/before"
}

test_refusals_are_counted_and_the_rest_goes_on() {
    make_host
    # A knob that reads and refuses to be written, also by root.
    ln -sf /proc/version "$host/proc/irq/7/smp_affinity_list"
    run 1 --apply --cores 2-3
    says 'refused /proc/irq/7/smp_affinity_list'
    expect proc/irq/30/smp_affinity_list 0,1
    run 0 --revert
    says 'had not been changed'
    expect proc/irq/30/smp_affinity_list 0-3
    # Without a place for the old values nothing is changed.
    ln -sf /proc/version "$work/no-state"
    run 1 --apply --only numa --state "$work/no-state/x"
    expect proc/sys/kernel/numa_balancing 1
}

test_groups_and_bare_hosts() {
    make_host
    run 0 --apply --only idle --cores 3-3
    expect sys/devices/system/cpu/cpu3/cpuidle/state1/disable 1
    expect sys/devices/system/cpu/cpu3/cpuidle/state0/disable 0
    expect sys/devices/system/cpu/cpu2/cpuidle/state1/disable 0
    expect proc/sys/kernel/numa_balancing 1
    run 0 --only irq --cores 0-3
    says 'nowhere to move interrupts'
    host=$work/empty
    mkdir -p "$host"
    # shellcheck disable=SC2086
    run 0 --apply --cores 0-1 --device sda
    silent_about 'set  '
    [ -z "$(find "$host" -type f)" ] || fail "$shell: files appeared on a bare host"
}

test_usage() {
    make_host
    for arguments in '--cores 3-1' '--cores 1,x' '--cores 4' '--cores' '--only nonsense' '--frob' \
        '--irq-cpus a' '--nic none0 --cores 1-1'; do
        # shellcheck disable=SC2086
        run 2 $arguments
        says 'tune.sh: '
    done
    run 0 --help
    says '--revert'
}

test_unit() {
    command -v systemd-analyze >/dev/null 2>&1 || {
        echo "skipped: no systemd-analyze here, the unit is not verified"
        return 0
    }
    # The programs and the user need not exist where this runs.
    sed -e 's|/usr/local/bin/felix-uring|/bin/true|' -e '/^User=/d; /^Group=/d' \
        "$here/felix-uring.service" >"$work/felix-uring.service"
    systemd-analyze verify --man=no "$work/felix-uring.service" >"$work/out" 2>&1 ||
        fail "the unit: $(cat "$work/out")"
    [ ! -s "$work/out" ] || fail "the unit: $(cat "$work/out")"
}

test_sysctl_file_agrees_with_the_script() {
    for setting in net.core.rmem_max net.core.wmem_max net.core.netdev_max_backlog kernel.numa_balancing; do
        value=$(sed -n "s/^$setting = //p" "$here/felix-uring.sysctl.conf")
        path=/proc/sys/$(echo "$setting" | tr . /)
        grep -qE "_knob $path $value( |\$)" "$here/tune.sh" || fail "$setting = $value is not what tune.sh sets"
    done
}

for shell in sh bash; do
    command -v "$shell" >/dev/null 2>&1 || continue
    test_dry_run_changes_nothing
    test_apply_and_revert
    test_refusals_are_counted_and_the_rest_goes_on
    test_groups_and_bare_hosts
    test_usage
done
test_unit
test_sysctl_file_agrees_with_the_script

if [ "$failures" -gt 0 ]; then
    echo "$failures failed"
    exit 1
fi
echo "tuning: all tests passed"
