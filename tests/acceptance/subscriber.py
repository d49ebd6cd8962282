#!/usr/bin/env python3
"""A long-lived subscriber of the published Python client, while brokers restart and the shard moves.

    tests/acceptance/subscriber.py [--binary FILE] [--seconds N]

Three brokers hold a stream of one shard. A publisher numbers its records and remembers what it was told
of each; one subscriber reads from the first record to the last, whatever happens to the brokers: an
orderly restart of the shard's leader, a kill of it, a restart of a follower, a move of the shard to
another broker. Then:

  * the offsets the subscriber saw follow one another without a gap, each once;
  * every acknowledged record is there, once, unchanged, at the offset its answer named;
  * no refused record is there; one of unknown outcome may be;
  * records of the publisher are in the order it sent them.

The faults are repeated until --seconds (or FELIX_SUBSCRIBER_SECONDS) are over; each happens at least
once. Exit status 0 when all of it held.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import felix

STREAM_WAIT_S = 60


def say(text):
    print(f"{time.monotonic() - BEGAN:7.1f} s  {text}", flush=True)


class Broker:
    """One broker process, started with the command line the launcher gave it."""

    def __init__(self, node, log_dir):
        self.node_id, self.admin = node["node_id"], node["admin"]
        self.client = node["client"]
        with open(f"/proc/{node['pid']}/cmdline", "rb") as handle:
            self.command = [os.fsdecode(part) for part in handle.read().split(b"\0")[:-1]]
        with open(f"/proc/{node['pid']}/environ", "rb") as handle:
            pairs = (os.fsdecode(part).partition("=") for part in handle.read().split(b"\0") if part)
            self.environment = {name: value for name, _, value in pairs}
        self.log = os.path.join(log_dir, f"{self.node_id}.log")
        self.process = None

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, env=self.environment, stdout=log, stderr=log)

    def wait_ready(self):
        deadline = time.monotonic() + STREAM_WAIT_S
        while not self.get("/ready"):
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.node_id} ended with {self.process.returncode}; see {self.log}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.node_id} is not ready")
            time.sleep(0.05)

    def stop(self, how):
        self.process.send_signal(how)
        status = self.process.wait(60)
        if how == signal.SIGTERM and status != 0:
            raise RuntimeError(f"{self.node_id} stopped with status {status}")

    def get(self, path):
        try:
            with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            return None

    def shard(self, name):
        """What it says of its copy of a shard, None while it says nothing."""
        status = json.loads(self.get("/status") or "{}")
        shards = [s for core in status.get("cores", []) for s in core.get("shards", [])]
        # A follower names the logs of a shard one by one.
        return next((s for s in shards if s["shard"] in (name, f"{name}/stream")), None)


class Cluster:
    """Three brokers whose first start is left to `cluster up`."""

    def __init__(self, binary, directory):
        launcher = subprocess.Popen(
            [binary, "cluster", "up", "--nodes", "3", "--replicas", "3", "--dir", directory, "--json"],
            stdout=subprocess.PIPE,
        )
        line = launcher.stdout.readline()
        if not line:
            raise RuntimeError("the cluster did not start")
        self.facts = json.loads(line)
        self.shard = "stream:{}/{}/{}#0".format(*self.scope())
        self.catalog = os.path.join(self.facts["dir"], "catalog.toml")
        with open(self.catalog) as handle:
            self.base, self.generation = handle.read(), 1
        self.brokers = [Broker(node, directory) for node in self.facts["nodes"]]
        launcher.send_signal(signal.SIGTERM)
        if launcher.wait(60) != 0:
            raise RuntimeError("the launcher did not stop its brokers in order")

    def start(self):
        for broker in self.brokers:
            broker.start()
        for broker in self.brokers:
            broker.wait_ready()

    def leader(self):
        """The broker that leads the stream's shard at the newest generation."""
        deadline = time.monotonic() + STREAM_WAIT_S
        while True:
            for broker in self.brokers:
                copy = broker.shard(self.shard) or {}
                if copy.get("role") == "leader" and copy["generation"] == self.generation:
                    return broker
            if time.monotonic() > deadline:
                raise RuntimeError(f"nobody leads the shard at generation {self.generation}")
            time.sleep(0.1)

    def move(self, to):
        """Gives the shard another leader at the next generation, the old one staying a holder."""
        self.generation += 1
        holders = [to] + [b.node_id for b in self.brokers if b.node_id != to]
        tenant, namespace, stream = self.scope()
        table = {
            "kind": "stream", "tenant": tenant, "namespace": namespace, "name": stream, "shard": 0,
            "leader": to, "replicas": holders, "generation": self.generation,
        }  # fmt: skip
        lines = [f"{name} = {json.dumps(value)}" for name, value in table.items()]
        fresh = self.catalog + ".new"
        with open(fresh, "w") as handle:
            # Where the launcher left it to the brokers who leads what, there is no such table yet.
            handle.write("\n".join([self.base, "[[assignment]]", *lines, ""]))
        os.rename(fresh, self.catalog)

    def wait_moved(self, old, to):
        """Until the new leader leads and the old one says that it does not."""
        deadline = time.monotonic() + STREAM_WAIT_S
        while self.leader() is not to or (old.shard(self.shard) or {}).get("role") == "leader":
            if time.monotonic() > deadline:
                raise RuntimeError(f"{old.node_id} still leads the shard")
            time.sleep(0.1)

    def wait_level(self):
        """Until every holder has what the leader has."""
        deadline = time.monotonic() + STREAM_WAIT_S
        while True:
            copies = [b.shard(self.shard) for b in self.brokers]
            ends = {c and c["durable_offset"] for c in copies}
            if len(ends) == 1 and None not in ends:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"the copies do not become level: {copies}")
            time.sleep(0.1)

    def client(self):
        facts = self.facts
        return felix.Client(
            [b.client for b in self.brokers],
            tenant_id=facts["tenant"],
            token=facts["token"],
            server_name="localhost",
            ca_file=facts["ca"],
        )

    def scope(self):
        return self.facts["tenant"], self.facts["namespace"], self.facts["stream"]


class Publisher(threading.Thread):
    """Publishes numbered records one after the other and remembers what became of each."""

    def __init__(self, cluster):
        super().__init__(daemon=True)
        self.cluster = cluster
        self.acked, self.unknown, self.refused = {}, set(), set()
        self.may_run, self.idle, self.over = threading.Event(), threading.Event(), False
        self.fault = None
        self.may_run.set()

    def run(self):
        try:
            with self.cluster.client() as client:
                number = 0
                while not self.over:
                    if not self.may_run.is_set():
                        self.idle.set()
                        self.may_run.wait()
                        self.idle.clear()
                    self.publish(client, number)
                    number += 1
        except BaseException as fault:  # noqa: BLE001
            self.fault = fault

    def publish(self, client, number):
        try:
            self.acked[number] = client.publish(*self.cluster.scope(), b"record-%d" % number)
            time.sleep(0.002)
        except felix.OutcomeUnknownError:
            self.unknown.add(number)
        except (felix.ShardUnavailableError, felix.OverloadedError):
            self.refused.add(number)
            time.sleep(0.05)
        except felix.FelixError:
            # Of a lost connection nobody knows what became of what was on it.
            self.unknown.add(number)
            time.sleep(0.05)

    def pause(self):
        self.may_run.clear()
        if not self.idle.wait(60):
            raise RuntimeError("the publisher does not come to rest")

    def resume(self):
        self.may_run.set()

    def wait_progress(self, records=100):
        """Until so many more records are acknowledged."""
        target, deadline = len(self.acked) + records, time.monotonic() + STREAM_WAIT_S
        while len(self.acked) < target:
            if self.fault is not None:
                raise self.fault
            if time.monotonic() > deadline:
                raise RuntimeError(f"no progress: {len(self.acked)} records are acknowledged")
            time.sleep(0.05)


class Subscriber(threading.Thread):
    """Reads with one subscription. What the client repairs by itself is not seen here; when it gives up,
    the application does what its documentation says: it resumes behind the last record it has."""

    def __init__(self, cluster):
        super().__init__(daemon=True)
        self.cluster = cluster
        self.seen, self.resumes, self.over, self.fault = [], [], False, None

    def run(self):
        try:
            with self.cluster.client() as client:
                while not self.over:
                    self.read(client)
        except BaseException as fault:  # noqa: BLE001
            self.fault = fault

    def read(self, client):
        start = self.seen[-1][0] + 1 if self.seen else "earliest"
        try:
            with client.subscribe(*self.cluster.scope(), start=start) as events:
                while not self.over:
                    event = events.next_event(timeout=0.5)
                    if event is not None:
                        self.seen.append((event.offset, bytes(event.payload)))
                    elif events.closed:
                        self.resumes.append("the subscription closed")
                        return
        except felix.FelixError as error:
            self.resumes.append(f"{type(error).__name__}: {error}")
            time.sleep(0.2)

    def wait_for(self, offset):
        deadline = time.monotonic() + STREAM_WAIT_S
        while not self.seen or self.seen[-1][0] < offset:
            if self.fault is not None:
                raise self.fault
            if time.monotonic() > deadline:
                last = self.seen[-1][0] if self.seen else None
                raise RuntimeError(f"the subscriber is at {last}, not at {offset}; {self.resumes[-5:]}")
            time.sleep(0.05)


def restart(broker, how):
    broker.stop(how)
    broker.start()
    broker.wait_ready()
    return broker.node_id


def orderly_restart(cluster, publisher):
    return f"the leader, {restart(cluster.leader(), signal.SIGTERM)}, was restarted in order"


def killed(cluster, publisher):
    return f"the leader, {restart(cluster.leader(), signal.SIGKILL)}, was killed and started again"


def follower_restart(cluster, publisher):
    leader = cluster.leader()
    follower = next(b for b in cluster.brokers if b is not leader)
    return f"a follower, {restart(follower, signal.SIGTERM)}, was restarted"


def moved(cluster, publisher):
    # Nothing is acknowledged that the next leader does not have: the stream answers when its leader has a
    # record, and a leader that has not read the catalog yet would go on answering.
    publisher.pause()
    cluster.wait_level()
    old = cluster.leader()
    to = next(b for b in cluster.brokers if b is not old)
    cluster.move(to.node_id)
    cluster.wait_moved(old, to)
    publisher.resume()
    return f"the shard moved from {old.node_id} to {to.node_id}"


def judge(publisher, subscriber):
    faults = []
    offsets = [offset for offset, _ in subscriber.seen]
    for before, after in zip(offsets, offsets[1:]):
        if after != before + 1:
            kind = "a gap" if after > before else "a repetition"
            faults.append(f"{kind}: {before} and then {after}")
    if offsets and offsets[0] != 0:
        faults.append(f"the first record has offset {offsets[0]}")
    numbers = [int(payload.split(b"-")[1]) for _, payload in subscriber.seen]
    if numbers != sorted(set(numbers)):
        faults.append("records are not in the order they were sent in, or one is there twice")
    at = dict(subscriber.seen)
    for number, offset in publisher.acked.items():
        if at.get(offset) != b"record-%d" % number:
            faults.append(f"acknowledged record {number} at {offset}: found {at.get(offset)!r}")
    found = set(numbers) & publisher.refused
    if found:
        faults.append(f"refused records are there: {sorted(found)[:5]}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--binary", default="target/release/felix-uring")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("FELIX_SUBSCRIBER_SECONDS", 0)))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        cluster = Cluster(os.path.abspath(args.binary), directory)
        try:
            return run(cluster, args.seconds)
        except BaseException:
            for broker in cluster.brokers:
                print(f"--- {broker.log}")
                subprocess.run(["tail", "-n", "30", broker.log], check=False)
            raise
        finally:
            for broker in cluster.brokers:
                if broker.process is not None and broker.process.poll() is None:
                    broker.process.kill()
                    broker.process.wait()


def run(cluster, seconds):
    cluster.start()
    publisher, subscriber = Publisher(cluster), Subscriber(cluster)
    subscriber.start()
    publisher.start()
    publisher.wait_progress()
    end, rounds = time.monotonic() + seconds, 0
    while rounds == 0 or time.monotonic() < end:
        for fault in (orderly_restart, killed, follower_restart, moved, orderly_restart):
            what = fault(cluster, publisher)
            publisher.wait_progress()
            subscriber.wait_for(max(publisher.acked.values()))
            say(f"{what}; the subscriber has {len(subscriber.seen)} records")
        rounds += 1
    publisher.over = True
    publisher.join(60)
    subscriber.wait_for(max(publisher.acked.values()))
    subscriber.over = True
    subscriber.join(60)
    faults = judge(publisher, subscriber)
    for broker in cluster.brokers:
        broker.stop(signal.SIGTERM)
    say(
        f"{len(publisher.acked)} records acknowledged, {len(publisher.unknown)} of unknown outcome, "
        f"{len(publisher.refused)} refused; {len(subscriber.seen)} delivered; "
        f"the application resumed {len(subscriber.resumes)} times {subscriber.resumes[:3]}"
    )
    for fault in faults[:20]:
        print(f"FAILED  {fault}")
    if not faults:
        print("ok      no gap, no repetition, every acknowledged record once at its offset")
    return 1 if faults else 0


BEGAN = time.monotonic()
if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # A call of the client that never returns must not hold the process open.
    os._exit(status)
