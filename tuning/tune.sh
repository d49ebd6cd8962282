#!/bin/sh
# Tunes a Linux host for felix-uring. Shows what it would do and why; changes nothing unless asked.
#
#   tune.sh [--dry-run]          print every change with its reason (default)
#   tune.sh --apply              make the changes; the previous values go to the state file
#   tune.sh --revert             put the previous values back
#
#   --cores LIST                 CPUs of the data cores, as given to `felix-uring serve --cores`
#   --irq-cpus LIST              CPUs for interrupts (default: all online CPUs not in --cores)
#   --data-dir DIR               tune the disk under DIR
#   --device NAME                tune this block device (nvme0n1); may be repeated with commas
#   --nic NAME                   spread the interrupts of this network interface
#   --only GROUP[,GROUP...]      of: cpu thp numa udp disk irq idle memlock isolation
#   --state FILE                 default /run/felix-uring-tuning.state
#   --root DIR                   use DIR/sys and DIR/proc instead of the real ones (for tests)
#
# Nothing here survives a reboot, nor edits a file under /etc or /boot: what has to be permanent is
# printed, or is a file beside this script to be copied. `idle` costs power and runs only when named
# with --only. Exit status: 0 done, 1 some change was refused, 2 usage.

set -u

mode=dry-run
cores=''
irq_cpus=''
data_dir=''
devices=''
nic=''
only='cpu,thp,numa,udp,disk,irq,memlock,isolation'
root=''
state=''
refused=0
here=$(dirname "$0")

die() {
    echo "tune.sh: $*" >&2
    exit 2
}

need_value() {
    [ $# -ge 2 ] || die "$1 needs a value"
}

while [ $# -gt 0 ]; do
    case "$1" in
        --dry-run) mode=dry-run ;;
        --apply) mode=apply ;;
        --revert) mode=revert ;;
        --cores) need_value "$@"; cores=$2; shift ;;
        --irq-cpus) need_value "$@"; irq_cpus=$2; shift ;;
        --data-dir) need_value "$@"; data_dir=$2; shift ;;
        --device) need_value "$@"; devices=$(echo "$2" | tr ',' ' '); shift ;;
        --nic) need_value "$@"; nic=$2; shift ;;
        --only) need_value "$@"; only=$2; shift ;;
        --state) need_value "$@"; state=$2; shift ;;
        --root) need_value "$@"; root=${2%/}; shift ;;
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) die "unknown argument $1 (see --help)" ;;
    esac
    shift
done

state=${state:-$root/run/felix-uring-tuning.state}

# ---- lists of CPUs ------------------------------------------------------------------------------

# expand 0-2,5 -> "0 1 2 5 "; ends the (sub)shell with status 2 when it is no list
expand() {
    for part in $(echo "$1" | tr ',' ' '); do
        case "$part" in
            *[!0-9-]* | -* | *- | *-*-*) die "'$1' is not a list of CPUs like 0-3,6" ;;
            *-*)
                at=${part%-*}
                [ "$at" -le "${part#*-}" ] || die "the range $part runs backwards"
                while [ "$at" -le "${part#*-}" ]; do
                    printf '%s ' "$at"
                    at=$((at + 1))
                done
                ;;
            *) printf '%s ' "$part" ;;
        esac
    done
}

# without "0 1 2 3" "1 2" -> "0 3"
without() {
    for item in $1; do
        case " $2 " in
            *" $item "*) ;;
            *) printf '%s ' "$item" ;;
        esac
    done
}

commas() {
    echo "$*" | sed 's/^ *//; s/ *$//; s/  */,/g'
}

# ---- one change ---------------------------------------------------------------------------------

# The value of a knob; for knobs like "mq-deadline [none]" the chosen word.
current_value() {
    value=$(cat "$1" 2>/dev/null) || return 1
    case "$value" in
        *\[*\]*) echo "$value" | sed 's/.*\[\(.*\)\].*/\1/' ;;
        *) echo "$value" ;;
    esac
}

# remember KNOB OLD: only the first value counts, or a second --apply would forget the original.
remember() {
    if [ -f "$state" ] && cut -f 1 "$state" | grep -qxF "$1"; then
        return 0
    fi
    mkdir -p "$(dirname "$state")" && printf '%s\t%s\n' "$1" "$2" >>"$state"
}

# Says why, once for a run of changes with the same reason.
last_reason=''
because() {
    [ "$1" = "$last_reason" ] || echo "        $1"
    last_reason=$1
}

# set_knob KNOB VALUE REASON
set_knob() {
    knob=$1
    wanted=$2
    file=$root$knob
    if [ ! -e "$file" ]; then
        echo "absent  $knob (this host has no such setting)"
        return 0
    fi
    if ! old=$(current_value "$file"); then
        echo "absent  $knob (not readable)"
        return 0
    fi
    if [ "$old" = "$wanted" ]; then
        echo "ok      $knob = $wanted"
        return 0
    fi
    if [ "$mode" = dry-run ]; then
        echo "would   $knob: $old -> $wanted"
        because "$3"
        return 0
    fi
    if ! remember "$knob" "$old"; then
        echo "refused $knob (the state file $state cannot be written, so it is left alone)"
        refused=$((refused + 1))
        return 0
    fi
    if (printf '%s\n' "$wanted" >"$file") 2>/dev/null; then
        echo "set     $knob: $old -> $wanted"
        because "$3"
    else
        echo "refused $knob (stays $old; the kernel or a missing privilege forbids it)"
        refused=$((refused + 1))
    fi
}

# raise_knob KNOB VALUE REASON: never lowers what somebody has set higher.
raise_knob() {
    old=$(current_value "$root$1" 2>/dev/null) || old=''
    case "$old" in
        '' | *[!0-9]*) ;;
        *)
            if [ "$old" -ge "$2" ]; then
                echo "ok      $1 = $old (at least $2)"
                return 0
            fi
            ;;
    esac
    set_knob "$1" "$2" "$3"
}

# knobs GLOB: the knobs under the root that match, without the root.
knobs() {
    for path in $root$1; do
        [ -e "$path" ] && echo "${path#"$root"}"
    done
}

revert() {
    if [ ! -f "$state" ]; then
        echo "nothing to revert: no state file $state"
        return 0
    fi
    kept=''
    # Last change first, in case one depends on another.
    reversed=$(sed -n '1!G;h;$p' "$state")
    while IFS="$(printf '\t')" read -r knob old; do
        if [ ! -e "$root$knob" ]; then
            echo "absent  $knob (gone; was $old)"
        elif (printf '%s\n' "$old" >"$root$knob") 2>/dev/null; then
            echo "revert  $knob = $old"
        elif [ "$(current_value "$root$knob")" = "$old" ]; then
            echo "ok      $knob = $old (had not been changed)"
        else
            echo "refused $knob (should be $old)"
            kept="$kept$knob	$old
"
            refused=$((refused + 1))
        fi
    done <<LIST
$reversed
LIST
    if [ -n "$kept" ]; then
        printf '%s' "$kept" >"$state"
    else
        rm -f "$state"
    fi
}

# ---- the groups ---------------------------------------------------------------------------------

tune_cpu() {
    for knob in $(knobs '/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor'); do
        number=$(echo "$knob" | sed 's|.*/cpu\([0-9]*\)/cpufreq/.*|\1|')
        case " $data_cpus " in
            "  " | *" $number "*) ;;
            *) continue ;;
        esac
        set_knob "$knob" performance \
            "a data core sleeps between bursts; a governor that follows load wakes it at a low clock"
    done
}

tune_thp() {
    set_knob /sys/kernel/mm/transparent_hugepage/enabled madvise \
        "assembling huge pages stops a core for milliseconds; buffers here gain nothing from them"
    set_knob /sys/kernel/mm/transparent_hugepage/defrag madvise \
        "the same for memory compaction on a page fault"
}

tune_numa() {
    set_knob /proc/sys/kernel/numa_balancing 0 \
        "pinned executors never move, so unmapping their pages to watch accesses is pure cost"
}

tune_udp() {
    raise_knob /proc/sys/net/core/rmem_max 8388608 \
        "QUIC receives offloaded batches of up to 64 KiB; a full buffer drops them silently"
    raise_knob /proc/sys/net/core/wmem_max 8388608 \
        "the same towards the network: one batch per connection and core is in flight"
    raise_knob /proc/sys/net/core/netdev_max_backlog 4096 \
        "packets queue here when a core is busy for longer than the card's ring lasts"
    echo "note    to keep it: cp $here/felix-uring.sysctl.conf /etc/sysctl.d/90-felix-uring.conf"
}

# The disks under the data directory, as names in /sys/block.
find_devices() {
    [ -n "$devices" ] && return 0
    [ -n "$data_dir" ] || return 0
    source=$(findmnt -no SOURCE --target "$data_dir" 2>/dev/null | sed 's/\[.*//') || source=''
    name=$(basename "${source:-none}")
    if [ -e "$root/sys/class/block/$name/partition" ]; then
        name=$(basename "$(dirname "$(readlink -f "$root/sys/class/block/$name")")")
    fi
    below=$(ls "$root/sys/block/$name/slaves" 2>/dev/null)
    devices=${below:-$name}
}

tune_disk() {
    find_devices
    if [ -z "$devices" ]; then
        echo "note    no --device and no --data-dir: disks are left alone"
        return 0
    fi
    for device in $devices; do
        queue=/sys/block/$device/queue
        set_knob "$queue/scheduler" none \
            "one writer a core with few, large, already ordered writes: a scheduler only adds a lock"
        set_knob "$queue/nomerges" 2 \
            "commit groups are whole; looking for neighbours to merge with costs CPU and finds none"
        set_knob "$queue/rq_affinity" 2 \
            "completes on the CPU that submitted, where the executor and its caches are"
        set_knob "$queue/wbt_lat_usec" 0 \
            "throttling of background writes is for page cache traffic; the logs bypass it"
        if cache=$(current_value "$root$queue/write_cache"); then
            echo "note    $queue/write_cache = $cache (never changed here: it decides what a flush does)"
        fi
    done
}

tune_irq() {
    if [ -z "$cores" ]; then
        echo "note    no --cores: interrupts are left alone"
        return 0
    fi
    if [ -z "$(commas "$quiet_cpus")" ]; then
        echo "note    every CPU is a data core: there is nowhere to move interrupts to"
        return 0
    fi
    if [ -z "$root" ] && pidof irqbalance >/dev/null 2>&1; then
        echo "note    irqbalance runs and will move interrupts back: stop it, or ban the data CPUs"
    fi
    own=''
    if [ -n "$nic" ]; then
        [ -d "$root/sys/class/net/$nic" ] || die "there is no network interface $nic"
        own=$(ls "$root/sys/class/net/$nic/device/msi_irqs" 2>/dev/null | sort -n | tr '\n' ' ')
        [ -n "$own" ] || echo "note    $nic lists no interrupts of its own (a virtual card?)"
        spread_nic
    fi
    for knob in $(knobs '/proc/irq/[0-9]*/smp_affinity_list'); do
        number=$(echo "$knob" | sed 's|/proc/irq/\([0-9]*\)/.*|\1|')
        case " $own " in *" $number "*) continue ;; esac
        # Queues of NVMe disks are bound by the kernel, one a CPU, and refuse this: as they should.
        set_knob "$knob" "$(commas "$quiet_cpus")" "keeps interrupts of other devices off the data cores"
    done
}

spread_nic() {
    next=$quiet_cpus
    for number in $own; do
        [ -n "$(commas "$next")" ] || next=$quiet_cpus
        cpu=$(echo "$next" | sed 's/^ *//' | cut -d ' ' -f 1)
        next=$(without "$next" "$cpu")
        set_knob "/proc/irq/$number/smp_affinity_list" "$cpu" \
            "one queue of $nic a CPU, beside the data cores: receiving does not interrupt a commit"
    done
}

# Deep sleep states of the data cores; only when named, because it costs power all day.
tune_idle() {
    for state_dir in $(knobs '/sys/devices/system/cpu/cpu[0-9]*/cpuidle/state[0-9]*'); do
        number=$(echo "$state_dir" | sed 's|.*/cpu\([0-9]*\)/cpuidle/.*|\1|')
        case " $data_cpus " in
            "  " | *" $number "*) ;;
            *) continue ;;
        esac
        latency=$(current_value "$root$state_dir/latency") || continue
        if [ "$latency" -gt 20 ] 2>/dev/null; then
            set_knob "$state_dir/disable" 1 "waking from this state takes $latency us of every first packet"
        fi
    done
}

show_memlock() {
    if [ -z "$cores" ]; then
        count=$(ls -d "$root"/sys/devices/system/cpu/cpu[0-9]* 2>/dev/null | grep -c .)
    else
        count=$(echo "$data_cpus" | wc -w)
    fi
    # Three rings an executor, each with 1 MiB of registered memory and, at depth 4096, 404 KiB.
    bytes=$((count * 3 * (1048576 + 413696)))
    echo "note    locked memory: $count executors at the default 1 MiB and queue depth 4096 need at most"
    echo "        $bytes bytes. In the unit: LimitMEMLOCK=$bytes (felix-uring.service has infinity);"
    echo "        for a shell user: echo 'felix-uring - memlock $((bytes / 1024))' > /etc/security/limits.d/felix-uring.conf"
}

show_isolation() {
    if [ -z "$cores" ]; then
        echo "note    no --cores: no CPU isolation to suggest"
        return 0
    fi
    list=$(commas "$data_cpus")
    echo "note    for the steadiest latency, give the data cores to the broker alone. Kernel command line"
    echo "        (edit the boot loader yourself; reboot): nohz_full=$list rcu_nocbs=$list \\"
    echo "        isolcpus=managed_irq,domain,$list irqaffinity=$(commas "$quiet_cpus")"
    echo "        Less drastic and without a reboot: AllowedCPUs= for all other slices of systemd."
}

# ---- run ----------------------------------------------------------------------------------------

online=$(cat "$root/sys/devices/system/cpu/online" 2>/dev/null || echo 0)
case "$cores" in
    '' | *[,-]*) ;;
    *) die "--cores $cores: a bare number is a count; list the CPUs, one as $cores-$cores (felix-uring check prints them)" ;;
esac
data_cpus=$(expand "$cores") || exit 2
all_cpus=$(expand "$online") || exit 2
if [ -n "$irq_cpus" ]; then
    quiet_cpus=$(expand "$irq_cpus") || exit 2
else
    quiet_cpus=$(without "$all_cpus" "$data_cpus")
fi

if [ "$mode" = revert ]; then
    revert
else
    for group in $(echo "$only" | tr ',' ' '); do
        echo "# $group"
        case "$group" in
            cpu | thp | numa | udp | disk | irq | idle) "tune_$group" ;;
            memlock | isolation) "show_$group" ;;
            *) die "unknown group $group" ;;
        esac
    done
    [ "$mode" = dry-run ] && echo "# nothing was changed; --apply makes the changes, --revert undoes them"
fi

if [ "$refused" -gt 0 ]; then
    echo "# $refused refused" >&2
    exit 1
fi
exit 0
