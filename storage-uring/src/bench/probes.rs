//! Raw probes over the same private ring: no machine, no executor, one thread that waits in the kernel.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{opcode, squeue, types, IoUring};
use serde::Serialize;
use shard_executor::topology::pin_current_thread;
use std::os::fd::AsRawFd;

use super::{thread_cpu, Percentiles};
use crate::error::StorageError;
use crate::format::extent::EXTENT_HEADER_BYTES;
use crate::format::group::GROUP_HEADER_BYTES;
use crate::format::record::RECORD_HEADER_BYTES;
use crate::format::{align_up, ALIGN};
use crate::slab::SlabWriter;

/// What a probe measured.
#[derive(Debug, Clone, Default, Serialize)]
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
    fn written_file(&self, index: usize, bytes: u64) -> Result<Arc<File>, StorageError> {
        let path = self.0.join(format!("file-{index}"));
        let write = || -> std::io::Result<Arc<File>> {
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
            Ok(Arc::new(
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
        // The memory groups are in: whole huge pages, where there are some.
        let mut buffer = SlabWriter::new(buffer_bytes.next_multiple_of(2 << 20));
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
        self.queue(&entry, tag)
    }

    /// A read into the part of the buffer that belongs to `tag`.
    fn pull(
        &mut self,
        file: &File,
        position: u64,
        len: usize,
        tag: u64,
    ) -> Result<(), StorageError> {
        let at = tag as usize * len;
        let start = self.buffer.tail()[at..at + len].as_mut_ptr();
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), start, len as u32)
            .offset(position)
            .build();
        self.queue(&entry, tag)
    }

    fn queue(&mut self, entry: &squeue::Entry, tag: u64) -> Result<(), StorageError> {
        loop {
            // SAFETY: file and buffer outlive every completion: the probes wait for all before they end.
            let pushed = unsafe { self.ring.submission().push(&entry.clone().user_data(tag)) };
            if pushed.is_ok() {
                return Ok(());
            }
            self.ring.submit().map_err(StorageError::Ring)?;
        }
    }

    /// Waits for at least one operation and calls `on_done` with each tag and the bytes done; it says
    /// whether these are all.
    fn wait(&mut self, mut on_done: impl FnMut(u64, usize) -> bool) -> Result<(), StorageError> {
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
            if !on_done(tag, usize::try_from(result).unwrap_or(0)) {
                return Err(StorageError::Failed(format!(
                    "a probe's operation answered {result}"
                )));
            }
        }
        Ok(())
    }
}

/// Files in the state in which segments are handed out: every block written with zeros and synced. What is
/// written to them, with nothing around it, is the rate a core log of those commits cannot exceed.
pub struct RawFiles {
    files: Vec<Arc<File>>,
    /// CPU the writing thread is bound to.
    cpu: Option<usize>,
    file_bytes: u64,
    /// File and position of the next write.
    next: (usize, u64),
    // Dropped last: removes the files.
    _place: ProbeDir,
}

impl RawFiles {
    /// Prepares `count` files of `file_bytes` below `dir`, to be written from `cpu`.
    pub fn prepare(
        dir: &Path,
        count: usize,
        file_bytes: u64,
        cpu: Option<usize>,
    ) -> Result<Self, StorageError> {
        let place = ProbeDir::new(dir, "raw")?;
        let files = (0..count.max(1))
            .map(|index| place.written_file(index, file_bytes))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            files,
            cpu,
            file_bytes,
            next: (0, 0),
            _place: place,
        })
    }

    /// Whether `bytes` can be written without coming to a block that was written before.
    pub fn has_fresh(&self, bytes: u64) -> bool {
        let (file, position) = self.next;
        let left = (self.files.len() - file) as u64 * self.file_bytes;
        left.saturating_sub(position) >= bytes
    }

    /// Writes front to back, file after file and then from the first one again, `depth` at once, in the
    /// given sizes over and over, until `duration` is over.
    pub fn write(
        &mut self,
        sizes: &[u32],
        depth: usize,
        duration: Duration,
    ) -> Result<RawReport, StorageError> {
        let cpu = self.cpu;
        on_cpu(cpu, move || self.write_here(sizes, depth, duration))
    }

    fn write_here(
        &mut self,
        sizes: &[u32],
        depth: usize,
        duration: Duration,
    ) -> Result<RawReport, StorageError> {
        let sizes = Sizes::new(sizes)?;
        if sizes.largest as u64 > self.file_bytes {
            return Err(StorageError::Failed(
                "a write larger than a file".to_owned(),
            ));
        }
        let mut writer = Writer::new(256, sizes.largest)?;
        run(&mut writer, depth, duration, |writer, nth, tag| {
            let len = sizes.get(nth);
            let (file, position) = self.place(len as u64);
            writer.push(&self.files[file], position, len, tag)?;
            Ok(len)
        })
    }

    fn place(&mut self, len: u64) -> (usize, u64) {
        let (mut file, mut position) = self.next;
        if position + len > self.file_bytes {
            file = (file + 1) % self.files.len();
            position = 0;
        }
        self.next = (file, position + len);
        (file, position)
    }
}

/// Runs `work` on a thread bound to a CPU, as the core it is compared with is.
fn on_cpu<T: Send>(
    cpu: Option<usize>,
    work: impl FnOnce() -> Result<T, StorageError> + Send,
) -> Result<T, StorageError> {
    let failed = |what: &dyn std::fmt::Display| StorageError::Failed(what.to_string());
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            if let Some(cpu) = cpu {
                pin_current_thread(&[cpu]).map_err(|error| failed(&error))?;
            }
            work()
        });
        let ended = thread.join();
        ended.map_err(|_| failed(&"a probe's thread panicked"))?
    })
}

/// Reads files front to back, `depth` reads of `len` bytes at once, until all are read.
pub(super) fn raw_read(
    files: &[Arc<File>],
    len: usize,
    depth: usize,
    cpu: Option<usize>,
) -> Result<RawReport, StorageError> {
    on_cpu(cpu, move || raw_read_here(files, len, depth))
}

fn raw_read_here(files: &[Arc<File>], len: usize, depth: usize) -> Result<RawReport, StorageError> {
    let len = align_up(len.max(1) as u64) as usize;
    let mut places = VecDeque::new();
    for file in files {
        let size = file.metadata().map_err(StorageError::Ring)?.len();
        places.extend((0..size / len as u64).map(|nth| (Arc::clone(file), nth * len as u64)));
    }
    let mut reader = Writer::new(256, len * depth)?;
    run(&mut reader, depth, Duration::MAX, |reader, _, tag| {
        let Some((file, position)) = places.pop_front() else {
            return Ok(0);
        };
        reader.pull(&file, position, len, tag)?;
        Ok(len)
    })
}

/// Sizes of writes, repeated for ever.
struct Sizes {
    bytes: Vec<usize>,
    largest: usize,
}

impl Sizes {
    fn new(sizes: &[u32]) -> Result<Self, StorageError> {
        let bytes: Vec<usize> = sizes
            .iter()
            .map(|size| align_up(u64::from(*size).max(1)) as usize)
            .collect();
        match bytes.iter().max() {
            Some(largest) => Ok(Self {
                largest: *largest,
                bytes,
            }),
            None => Err(StorageError::Failed("no sizes to write".to_owned())),
        }
    }

    fn get(&self, nth: usize) -> usize {
        self.bytes[nth % self.bytes.len()]
    }
}

/// Keeps `depth` operations under way; `start` starts the nth one and says its length, 0 at the end.
fn run(
    ring: &mut Writer,
    depth: usize,
    duration: Duration,
    mut start: impl FnMut(&mut Writer, usize, u64) -> Result<usize, StorageError>,
) -> Result<RawReport, StorageError> {
    let (started, cpu) = (Instant::now(), thread_cpu());
    let mut under_way = vec![(started, 0usize); depth];
    let mut samples = Vec::new();
    let (mut outstanding, mut operations, mut bytes) = (0usize, 0u64, 0u64);
    let mut nth = 0;
    let mut free: Vec<u64> = (0..depth as u64).collect();
    loop {
        for tag in free.drain(..) {
            if started.elapsed() >= duration {
                continue;
            }
            let len = start(ring, nth, tag)?;
            if len > 0 {
                under_way[tag as usize] = (Instant::now(), len);
                outstanding += 1;
                nth += 1;
            }
        }
        if outstanding == 0 {
            break;
        }
        ring.wait(|tag, stored| {
            let (since, len) = under_way[tag as usize];
            samples.push(u32::try_from(since.elapsed().as_micros()).unwrap_or(u32::MAX));
            free.push(tag);
            operations += 1;
            bytes += len as u64;
            stored == len
        })?;
        outstanding -= free.len();
    }
    let seconds = started.elapsed().as_secs_f64();
    Ok(RawReport {
        writes: operations,
        writes_per_s: operations as f64 / seconds,
        mb_per_s: bytes as f64 / seconds / 1e6,
        records_per_s: 0.0,
        latency_us: Percentiles::of(&samples),
        cpu_share: (thread_cpu() - cpu).as_secs_f64() / seconds,
    })
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
            writer.wait(|_, stored| {
                left -= 1;
                stored == len
            })?;
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
        &samples,
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
    samples: &[u32],
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
