#!/usr/bin/env python3
"""A wide stream and a consumer group with the published Python client, from every broker of a cluster.

    tests/acceptance/sharded.py CLUSTER.json

CLUSTER.json is the first line of `cluster up --shards N --json`. Every broker is talked to once: keyed
publishes spread over the shards and come back complete and in the order of their keys from a subscription
to all shards; a group on every shard is given every record once and is settled.
"""

import collections
import json
import sys
import time
import uuid

import felix

STREAM = "sharded"
KEYS = 24
EACH = 8
PATIENCE_S = 30


def expect(condition, why):
    if not condition:
        raise SystemExit(f"FAIL {why}")


def publish(client, scope, run):
    """Records by shard cannot be known here; by key they can."""
    for number in range(EACH):
        for key in range(KEYS):
            offset = client.publish(*scope, f"{run}:{key}:{number}".encode(), key=b"key-%d" % key)
            expect(isinstance(offset, int), f"a keyed publish was answered {offset!r}")


def take(payload, run, seen, shards, shard):
    name, key, number = bytes(payload).decode().split(":")
    if name != run:
        return 0
    seen[key].append(int(number))
    shards[key].add(shard)
    return 1


def check(run, seen, shards, what):
    expect(len(seen) == KEYS, f"{what}: {len(seen)} of {KEYS} keys")
    for key, numbers in seen.items():
        expect(numbers == list(range(EACH)), f"{what}: key {key} came as {numbers}")
        expect(len(shards[key]) == 1, f"{what}: key {key} is on shards {shards[key]}")
    used = {next(iter(s)) for s in shards.values()}
    expect(len(used) > 1, f"{what}: every key went to shard {used}")


def subscribe(events, run):
    seen, shards, count = collections.defaultdict(list), collections.defaultdict(set), 0
    deadline = time.monotonic() + PATIENCE_S
    while count < KEYS * EACH:
        expect(time.monotonic() < deadline, f"the subscription brought {count} records")
        item = events.next_event(timeout=1.0)
        if isinstance(item, felix.ShardRecord):
            count += take(item.event.payload, run, seen, shards, item.shard)
        else:
            expect(item is None, f"the subscription said {item!r}")
    check(run, seen, shards, "subscription")


def consume(client, scope, run, width):
    group, seen, shards = f"g-{run}", collections.defaultdict(list), collections.defaultdict(set)
    count, deadline = 0, time.monotonic() + PATIENCE_S
    while count < KEYS * EACH:
        expect(time.monotonic() < deadline, f"the group brought {count} records")
        for shard in range(width):
            for record in client.group_poll(*scope, shard, group, max_records=64, wait=0.1):
                expect(record.attempts == 1, f"attempt {record.attempts} of a record that was acked")
                count += take(record.payload, run, seen, shards, shard)
                client.group_ack(*scope, shard, group, record.offset)
    check(run, seen, shards, "group")
    left = [client.group_poll(*scope, shard, group, wait=0.0) for shard in range(width)]
    expect(not any(left), f"a settled group was handed {left}")


def main():
    with open(sys.argv[1]) as file:
        cluster = json.loads(file.readline())
    scope = cluster["tenant"], cluster["namespace"], STREAM
    for node in cluster["nodes"]:
        run = uuid.uuid4().hex
        with felix.Client(
            node["client"],
            tenant_id=cluster["tenant"],
            token=cluster["token"],
            server_name="localhost",
            ca_file=cluster["ca"],
        ) as client:
            width = client.stream_shards(*scope)
            expect(width > 1, f"the stream has {width} shards")
            with client.subscribe_sharded(*scope) as events:
                expect(events.shards == width, f"a subscription to {events.shards} of {width} shards")
                publish(client, scope, run)
                subscribe(events, run)
            consume(client, scope, run, width)
        print(f"ok sharded stream and group by way of {node['node_id']}", flush=True)


if __name__ == "__main__":
    main()
