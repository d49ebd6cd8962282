//! The copies of a shard beside each other: waiting until they are level, and comparing them byte for byte.

use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use storage_uring::name::{LogKind, LogName};
use storage_uring::offline::Reader;

use super::cluster::Destination;
use crate::report::CopyCounts;

/// Bytes of payload read at once.
const READ_BYTES: usize = 4 << 20;
const POLL: Duration = Duration::from_millis(50);

impl Destination {
    /// Waits until every leader says that its followers lack nothing. A gauge is up to a second old, so
    /// what is seen has to hold for longer than that.
    pub fn wait_level(&self, patience: Duration) -> Result<()> {
        let Some(own) = &self.own else {
            return Ok(());
        };
        let give_up = Instant::now() + patience;
        let mut level_since: Option<Instant> = None;
        loop {
            let mut behind = Vec::new();
            for node in own.nodes() {
                let status = node.status()?;
                let cores = status["cores"].as_array().cloned().unwrap_or_default();
                for core in cores {
                    let replication = &core["replication"];
                    if replication["lag_records"] != 0 || replication["waiting_writes"] != 0 {
                        behind.push(format!("{}: {replication}", node.node_id()));
                    }
                }
            }
            match behind.is_empty() {
                false => level_since = None,
                true => {
                    let since = *level_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > Duration::from_millis(2500) {
                        return Ok(());
                    }
                }
            }
            if Instant::now() > give_up {
                bail!("the followers are not level: {}", behind.join("; "));
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Compares every copy of every shard with its leader's log. The brokers must be stopped.
pub fn compare_copies(destination: &Destination) -> Result<CopyCounts> {
    let mut counts = CopyCounts::default();
    let Some(own) = &destination.own else {
        return Ok(counts);
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut readers = Vec::new();
    for node in own.nodes() {
        let dir = node.data_dir();
        let reader = Reader::open(dir, threads)
            .with_context(|| format!("the log in {} cannot be read", dir.display()))?;
        readers.push((node.node_id().to_string(), reader));
    }
    for shard in 0..destination.shards {
        let name = LogName {
            kind: LogKind::Stream,
            tenant: destination.names.tenant.clone(),
            namespace: destination.names.namespace.clone(),
            name: destination.names.stream.clone(),
            shard,
        };
        let leader = destination.owner_of[shard as usize];
        for follower in (0..readers.len()).filter(|node| *node != leader) {
            // A broker that holds no copy of the shard has no such log.
            if readers[follower].1.log(&name).is_none() {
                continue;
            }
            let (low, high) = readers.split_at_mut(leader.max(follower));
            let (low, high) = (&mut low[leader.min(follower)], &mut high[0]);
            let (first, second) = match leader < follower {
                true => (low, high),
                false => (high, low),
            };
            counts.copies += 1;
            if let Some(finding) = difference(&mut first.1, &mut second.1, &name, &mut counts)? {
                counts.unequal += 1;
                let what = format!("shard {shard} on {}: {finding}", second.0);
                if counts.findings.len() < 16 {
                    counts.findings.push(what);
                }
            }
        }
    }
    Ok(counts)
}

/// The first difference of two copies of a log, in words.
fn difference(
    leader: &mut Reader,
    follower: &mut Reader,
    name: &LogName,
    counts: &mut CopyCounts,
) -> Result<Option<String>> {
    let (Some(ours), Some(theirs)) = (leader.log(name), follower.log(name)) else {
        return Ok(Some("the leader has no log".to_string()));
    };
    if (ours.base, ours.tail) != (theirs.base, theirs.tail) {
        return Ok(Some(format!(
            "it holds {} to {}, the leader {} to {}",
            theirs.base, theirs.tail, ours.base, ours.tail
        )));
    }
    let mut next = ours.base;
    while next < ours.tail {
        let here = leader.read(ours.id, next, READ_BYTES)?;
        let mut copied = next;
        while copied < here.next_offset {
            let there = follower.read(theirs.id, copied, READ_BYTES)?;
            if there.records.is_empty() {
                bail!("nothing at offset {copied}, below the end");
            }
            for (offset, record) in (copied..here.next_offset).zip(&there.records) {
                if here.records[(offset - next) as usize] != *record {
                    return Ok(Some(format!("other bytes at offset {offset}")));
                }
                counts.records += 1;
            }
            copied = there.next_offset.min(here.next_offset);
        }
        next = here.next_offset;
    }
    Ok(None)
}
