//! Raw probes over the same private ring: no machine, no executor, one thread that waits in the kernel.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use io_uring::{opcode, types, IoUring};
use serde::Serialize;
use std::os::fd::AsRawFd;

use super::{thread_cpu, Percentiles};
use crate::error::StorageError;
use crate::format::extent::EXTENT_HEADER_BYTES;
use crate::format::group::GROUP_HEADER_BYTES;
use crate::format::record::RECORD_HEADER_BYTES;
use crate::format::{align_up, ALIGN};
use crate::slab::SlabWriter;

/// What a probe measured.
#[derive(Debug, Clone, Serialize)]
pub struct RawReport {
    /// Synced writes.
    pub writes: u64,
    /// Synced writes a second.
    pub writes_per_s: f64,
    /// Megabytes (10^6) a second.
    pub mb_per_s: f64,
    /// Records a second; only where writes carry records.
    pub records_per_s: f64,
    /// One write, microseconds; of a round where there are rounds.
    pub latency_us: Percentiles,
    /// CPU seconds of the thread for each second of the run.
    pub cpu_share: f64,
}

/// Files of a probe, removed afterwards.
struct ProbeDir(PathBuf);

impl ProbeDir {
    fn new(dir: &Path, what: &str) -> Result<Self, StorageError> {
        let dir = dir.join(format!("probe-{what}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).map_err(|error| StorageError::io("creating", &dir, error))?;
        Ok(Self(dir))
    }

    /// A fully written file, open with O_DIRECT and O_DSYNC.
    fn written_file(&self, index: usize, bytes: u64) -> Result<Rc<File>, StorageError> {
        let path = self.0.join(format!("file-{index}"));
        let write = || -> std::io::Result<Rc<File>> {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .custom_flags(libc::O_DIRECT)
                .open(&path)?;
            let mut zeros = SlabWriter::new(1 << 20);
            let mut at = 0;
            while at < bytes {
                let len = (bytes - at).min(1 << 20);
                file.write_all_at(&zeros.tail()[..len as usize], at)?;
                at += len;
            }
            file.sync_all()?;
            let flags = libc::O_DIRECT | libc::O_DSYNC;
            Ok(Rc::new(
                OpenOptions::new()
                    .read(true)
                    .write(true)
                    .custom_flags(flags)
                    .open(&path)?,
            ))
        };
        write().map_err(|error| StorageError::io("writing", &path, error))
    }
}

impl Drop for ProbeDir {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(dir = %self.0.display(), %error, "a probe's files stay behind");
        }
    }
}

struct Writer {
    ring: IoUring,
    buffer: SlabWriter,
}

impl Writer {
    fn new(entries: u32, buffer_bytes: usize) -> Result<Self, StorageError> {
        let ring = IoUring::builder()
            .setup_clamp()
            .build(entries)
            .map_err(StorageError::Ring)?;
        let mut buffer = SlabWriter::new(buffer_bytes);
        buffer.tail().fill(0x5a);
        Ok(Self { ring, buffer })
    }

    fn push(
        &mut self,
        file: &File,
        position: u64,
        len: usize,
        tag: u64,
    ) -> Result<(), StorageError> {
        let start = self.buffer.tail().as_ptr();
        let entry = opcode::Write::new(types::Fd(file.as_raw_fd()), start, len as u32)
            .offset(position)
            .build();
        loop {
            // SAFETY: file and buffer outlive every completion: the probes wait for all before they end.
            let pushed = unsafe { self.ring.submission().push(&entry.clone().user_data(tag)) };
            if pushed.is_ok() {
                return Ok(());
            }
            self.ring.submit().map_err(StorageError::Ring)?;
        }
    }

    /// Waits for at least one write and calls `on_done` with each tag.
    fn wait(&mut self, len: usize, mut on_done: impl FnMut(u64)) -> Result<(), StorageError> {
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => break,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(StorageError::Ring(error)),
            }
        }
        let done: Vec<(u64, i32)> = self
            .ring
            .completion()
            .map(|entry| (entry.user_data(), entry.result()))
            .collect();
        for (tag, result) in done {
            if usize::try_from(result) != Ok(len) {
                return Err(StorageError::Failed(format!(
                    "a probe's write answered {result}"
                )));
            }
            on_done(tag);
        }
        Ok(())
    }
}

/// Writes `group_bytes` at a time, `depth` in flight, over and over to one pre-written O_DSYNC file: the rate
/// a core log of that commit size cannot exceed.
pub fn raw_append_probe(
    dir: &Path,
    group_bytes: usize,
    depth: usize,
    duration: Duration,
) -> Result<RawReport, StorageError> {
    let len = align_up(group_bytes.max(1) as u64) as usize;
    let place = ProbeDir::new(dir, "raw")?;
    let file_bytes = (64u64 << 20).max(len as u64 * depth as u64 * 2) / len as u64 * len as u64;
    let file = place.written_file(0, file_bytes)?;
    let mut writer = Writer::new(256, len)?;
    let mut position = 0;
    let (started, cpu) = (Instant::now(), thread_cpu());
    let mut sent = vec![started; depth];
    let mut push = |writer: &mut Writer, tag: u64| {
        let here = position;
        position = if position + 2 * len as u64 > file_bytes {
            0
        } else {
            position + len as u64
        };
        writer.push(&file, here, len, tag)
    };
    for tag in 0..depth as u64 {
        push(&mut writer, tag)?;
    }
    let mut samples = Vec::new();
    let (mut outstanding, mut writes) = (depth, 0u64);
    while outstanding > 0 {
        let mut free = Vec::with_capacity(depth);
        writer.wait(len, |tag| free.push(tag))?;
        let now = Instant::now();
        for tag in free {
            samples.push(u32::try_from((now - sent[tag as usize]).as_micros()).unwrap_or(u32::MAX));
            writes += 1;
            if now - started >= duration {
                outstanding -= 1;
            } else {
                sent[tag as usize] = now;
                push(&mut writer, tag)?;
            }
        }
    }
    Ok(report(started, cpu, writes, len, 0, &mut samples))
}

/// The layout not chosen: one pre-written O_DSYNC file a shard, and in every round one write for every
/// active shard, each with the records its share of `producers` has outstanding. A round ends when all its
/// writes are durable.
pub fn per_shard_probe(
    dir: &Path,
    shards: usize,
    payload_bytes: usize,
    producers: usize,
    duration: Duration,
) -> Result<RawReport, StorageError> {
    let active = shards.min(producers).max(1);
    let per_shard = producers.div_ceil(active);
    let used = GROUP_HEADER_BYTES
        + EXTENT_HEADER_BYTES
        + per_shard * (RECORD_HEADER_BYTES + payload_bytes);
    let len = align_up(used as u64) as usize;
    let file_bytes = (len as u64 * 64).max(256 * 1024);
    let place = ProbeDir::new(dir, "per-shard")?;
    let files = (0..active)
        .map(|index| place.written_file(index, file_bytes))
        .collect::<Result<Vec<_>, _>>()?;
    let mut writer = Writer::new(2048, len)?;
    let payload = vec![0x5au8; payload_bytes];
    let mut position = 0;
    let (started, cpu) = (Instant::now(), thread_cpu());
    let mut samples = Vec::new();
    let mut writes = 0;
    while started.elapsed() < duration {
        let round = Instant::now();
        for (tag, file) in files.iter().enumerate() {
            fill(&mut writer.buffer, per_shard, &payload);
            writer.push(file, position, len, tag as u64)?;
        }
        let mut left = files.len();
        while left > 0 {
            writer.wait(len, |_| left -= 1)?;
        }
        writes += files.len() as u64;
        position = if position + 2 * len as u64 > file_bytes {
            0
        } else {
            position + len as u64
        };
        samples.push(u32::try_from(round.elapsed().as_micros()).unwrap_or(u32::MAX));
    }
    Ok(report(
        started,
        cpu,
        writes,
        len,
        per_shard as u64,
        &mut samples,
    ))
}

/// The CPU work of a shard's group: copy and checksum each record.
fn fill(buffer: &mut SlabWriter, records: usize, payload: &[u8]) {
    let bytes = buffer.tail();
    let mut at = GROUP_HEADER_BYTES + EXTENT_HEADER_BYTES;
    for offset in 0..records as u64 {
        at += crate::format::record::encode(
            &mut bytes[at..],
            crate::name::LogId(1),
            offset,
            0,
            payload,
        );
    }
    debug_assert!(at <= bytes.len() && bytes.len() % ALIGN == 0);
}

fn report(
    started: Instant,
    cpu: Duration,
    writes: u64,
    len: usize,
    records: u64,
    samples: &mut [u32],
) -> RawReport {
    let seconds = started.elapsed().as_secs_f64();
    RawReport {
        writes,
        writes_per_s: writes as f64 / seconds,
        mb_per_s: writes as f64 * len as f64 / seconds / 1e6,
        records_per_s: (writes * records) as f64 / seconds,
        latency_us: Percentiles::of(samples),
        cpu_share: (thread_cpu() - cpu).as_secs_f64() / seconds,
    }
}
