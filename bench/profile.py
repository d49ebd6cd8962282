"""Turns samples of both brokers into microseconds a record by part of the broker.

A sample in user space counts for the innermost source file of its address that belongs to a part, inlined
functions included; one in the kernel for the system call it was taken in. The sum over the parts is the
CPU time the brokers themselves report for the run, so that the samples only have to say how it is divided.
"""

import collections
import json
import os
import re
import subprocess
import sys

# The first that matches the path of the source file, or the name of the function where there is no file.
PARTS = [
    ("encryption", r"/ring-|aes|gcm|ghash|chacha|poly1305|ring_core"),
    ("QUIC", r"/quinn-proto-|/quinn-udp-|/rustls-|src/driver/quic/"),
    ("decode and encode", r"src/wire/|/crc32fast-"),
    ("route and permission", r"src/catalog/|src/auth/|src/ids\.rs|src/proto/ownership|src/driver/core/client/|"
     r"src/proto/client_session|src/driver/core/peer_(server|forwards|bounds|admission)"),
    ("slots and retries", r"src/proto/(forward|forward_order|correlation|convert|outcome|backoff|peer)|"
     r"src/driver/core/(forward|link|slots|timers)"),
    ("append", r"storage-uring/|src/driver/core/append|/crc32c-|crc32c"),
    ("event loop", r"/glommio-|shard-executor/|src/driver/core/(turn|mod|reads|report)|src/metrics|/io-uring-|"
     r"src/driver/core/"),
    ("memory", r"malloc|calloc|realloc|cfree|_int_free|memcpy|memmove|memset|memcmp|/libc\.so|ld-linux"),
]
KERNEL_PARTS = [
    ("kernel: UDP send", r"sendmsg|sendmmsg|sendto|udp_send|ip_send|loopback_xmit"),
    ("kernel: UDP receive", r"recvmsg|recvmmsg|recvfrom"),
    ("kernel: disk writes", r"io_write|vfs_write|blk_|submit_bio|iomap|ext4|xfs|nvme|virtio_blk|virtblk"),
    ("kernel: io_uring, sleep and wake", r"io_uring|io_cqring|ppoll|epoll|futex|schedule|hrtimer|nanosleep|eventfd"),
    ("kernel: interrupts", r"irq|apic|softirq"),
]


def part_of(name, parts):
    for part, pattern in parts:
        if re.search(pattern, name):
            return part
    return None


def read_samples(path):
    """(pid, leaf, whether in the kernel, names of the chain) of each sample."""
    samples, pid, chain = [], None, []
    for line in open(path):
        if not line.strip():
            if pid is not None and chain:
                samples.append((pid, chain))
            pid, chain = None, []
        elif pid is None:
            pid = line.split()[0]
        else:
            found = re.match(r"\s*([0-9a-f]+) (.*) \((.*)\)$", line.rstrip())
            if found:
                chain.append((int(found[1], 16), found[2], found[3]))
    if pid is not None and chain:
        samples.append((pid, chain))
    return samples


def code_segments(binary):
    """Offset in the file, address and size of each segment with code."""
    text = subprocess.run(["readelf", "-lW", binary], capture_output=True, text=True, check=True).stdout
    fields = (line.split() for line in text.splitlines())
    return [(int(f[1], 16), int(f[2], 16), int(f[4], 16)) for f in fields
            if len(f) > 7 and f[0] == "LOAD" and "E" in f[6:-1]]


def source_files(binary, addresses):
    """The source files of each address, innermost inlined function first."""
    addresses = sorted(addresses)
    text = "".join(f"0x{address:x}\n" for address in addresses)
    try:
        tool = ["llvm-symbolizer", f"--obj={binary}", "--inlines", "--functions=none", "--no-demangle"]
        out = subprocess.run(tool, input=text, capture_output=True, text=True, check=True).stdout
        blocks = out.strip().split("\n\n")
    except FileNotFoundError:
        tool = ["addr2line", "-e", binary, "-i", "-a"]
        out = subprocess.run(tool, input=text, capture_output=True, text=True, check=True).stdout
        blocks = [block.split("\n", 1)[-1] for block in re.split(r"(?m)^(?=0x)", out) if block]
    return dict(zip(addresses, (block.splitlines() for block in blocks)))


def main():
    run, samples_path, binary, brokers = sys.argv[1:5]
    run = json.load(open(run))
    samples = read_samples(samples_path)
    if not samples:
        sys.exit("profile.py: perf took no samples")
    segments, name = code_segments(binary), os.path.basename(binary)

    def own_address(entry):
        """The address in the binary of a sample in it, whose place perf gives as an offset in the file."""
        at, _, dso = entry
        inside = os.path.basename(dso) == name
        places = (at - start + address for start, address, size in segments if start <= at < start + size)
        return next(places, None) if inside else None

    def is_kernel(entry):
        return entry[2].startswith("[k") or entry[2].startswith("[guest") or entry[2] == "[unknown]" and entry[0] >> 63

    wanted = {own_address(chain[0]) for _, chain in samples if not is_kernel(chain[0])} - {None}
    files = source_files(binary, wanted)

    def part(chain):
        leaf = chain[0]
        if is_kernel(leaf):
            names = " ".join(entry[1] for entry in chain if is_kernel(entry))
            return part_of(names, KERNEL_PARTS) or "kernel: other"
        address = own_address(leaf)
        for line in files.get(address, []):
            found = part_of(line, PARTS)
            if found:
                return found
        return part_of(leaf[1], PARTS) or part_of(leaf[2], PARTS) or "other"

    counts = collections.defaultdict(collections.Counter)
    for pid, chain in samples:
        counts[pid][part(chain)] += 1
    # Brokers were started in the order of the report.
    pids = brokers.split(",")
    accounts = run["brokers"]
    columns = [(account["role"], counts[pid], account["cpu_s_per_million_records"]) for account, pid in zip(accounts, pids)]
    parts = [name for name, _ in PARTS + KERNEL_PARTS] + ["kernel: other", "other"]
    print(f"\nCPU microseconds a record, {run['result']['records_per_s']:,.0f} records/s of "
          f"{run['workload']['payload_bytes']} B in batches of {run['workload']['batch']}")
    print(f"{'':34}" + "".join(f"{role:>12}" for role, _, _ in columns) + f"{'sum':>12}")
    for name in parts:
        cells = [per_million * count[name] / max(1, sum(count.values())) for _, count, per_million in columns]
        if sum(cells) > 0:
            print(f"{name:34}" + "".join(f"{cell:12.3f}" for cell in cells) + f"{sum(cells):12.3f}")
    totals = [per_million for _, _, per_million in columns]
    print(f"{'all':34}" + "".join(f"{total:12.3f}" for total in totals) + f"{sum(totals):12.3f}")
    print("samples".ljust(34) + "".join(f"{sum(count.values()):12d}" for _, count, _ in columns))


main()
