//! Getting every record back after the run.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{bail, Context, Result};
use storage_uring::name::{LogKind, LogName};
use storage_uring::offline::Reader;

use super::args::Verify;
use super::cluster::Destination;
use crate::client::read_shard;
use crate::verify::{Ledger, ShardCheck, VerifyCounts};

/// Bytes of payload read at once.
const READ_BYTES: usize = 4 << 20;

/// Reads every shard back and checks it. The brokers must be stopped for [`Verify::Log`] and running for
/// [`Verify::Subscribe`].
pub fn read_back(destination: &Destination, ledger: Ledger, mode: Verify) -> Result<VerifyCounts> {
    match mode {
        Verify::None => Ok(VerifyCounts::default()),
        Verify::Log => from_files(destination, &ledger),
        Verify::Subscribe => by_subscribing(destination, ledger),
    }
}

fn from_files(destination: &Destination, ledger: &Ledger) -> Result<VerifyCounts> {
    let mut by_dir: BTreeMap<PathBuf, Vec<u32>> = BTreeMap::new();
    for shard in 0..destination.shards {
        let dir = destination
            .data_dir_of(shard)
            .context("the files of this cluster are not ours to read")?;
        by_dir.entry(dir).or_default().push(shard);
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut counts = VerifyCounts::default();
    for (dir, shards) in by_dir {
        let mut reader = Reader::open(&dir, threads)
            .with_context(|| format!("the log in {} cannot be read", dir.display()))?;
        for shard in shards {
            counts.absorb(check_log(&mut reader, destination, ledger, shard)?);
        }
    }
    Ok(counts)
}

/// Reads one shard back from the files of the stopped brokers.
pub fn read_back_shard(
    destination: &Destination,
    ledger: &Ledger,
    shard: u32,
) -> Result<VerifyCounts> {
    let dir = destination
        .data_dir_of(shard)
        .context("the files of this cluster are not ours to read")?;
    let mut reader = Reader::open(&dir, 1)
        .with_context(|| format!("the log in {} cannot be read", dir.display()))?;
    check_log(&mut reader, destination, ledger, shard)
}

fn check_log(
    reader: &mut Reader,
    destination: &Destination,
    ledger: &Ledger,
    shard: u32,
) -> Result<VerifyCounts> {
    let name = LogName {
        kind: LogKind::Stream,
        tenant: destination.names.tenant.clone(),
        namespace: destination.names.namespace.clone(),
        name: destination.names.stream.clone(),
        shard,
    };
    let mut check = ShardCheck::new(ledger, shard, false);
    // A shard nothing was published to has no log.
    if let Some(log) = reader.log(&name) {
        let mut next = log.base;
        while next < log.tail {
            let batch = reader
                .read(log.id, next, READ_BYTES)
                .with_context(|| format!("shard {shard} cannot be read from offset {next} on"))?;
            if batch.records.is_empty() {
                bail!(
                    "shard {shard} has nothing at offset {next}, below its end {}",
                    log.tail
                );
            }
            for (offset, payload) in (batch.first_offset..).zip(&batch.records) {
                check.on_record(offset, payload);
            }
            next = batch.next_offset;
        }
    }
    Ok(check.finish())
}

fn by_subscribing(destination: &Destination, ledger: Ledger) -> Result<VerifyCounts> {
    let ledger = Arc::new(ledger);
    let plan = destination.read_plan();
    let mut counts = VerifyCounts::default();
    for shard in 0..destination.shards {
        let known = ledger.shards().get(shard as usize);
        let Some(from) = known.and_then(|shard| shard.first_offset) else {
            // Nothing was acknowledged there, so there is nothing that must be found.
            continue;
        };
        let check = ShardCheck::new(Arc::clone(&ledger), shard, destination.own.is_none());
        let check = read_shard(&plan, shard, from, check, |check, offset, payload| {
            check.on_record(offset, payload);
        })
        .with_context(|| format!("shard {shard} cannot be read back"))?;
        counts.absorb(check.finish());
    }
    Ok(counts)
}
