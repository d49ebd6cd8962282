//! The data directory: its lock, its identity, its boot epoch, and where things lie in it.
//!
//! ```text
//! <data>/lock                            flock held while a broker runs; holds its process id
//! <data>/meta                            uuid, format version, boot epoch
//! <data>/core-log/<core>/seg-<seq>.fxl   segments, sequence in 16 hex digits
//! <data>/core-log/<core>/freed           segments that were given back
//! <data>/core-log/<core>/spare-<n>.fxs   zeroed files on their way to becoming segments
//! <data>/core-log/<core>/seg-<seq>.short   a start found this segment shorter than it was made
//! <data>/core-log/<core>/rewrite-<seq>.fxs  a rewritten segment that has not taken its place yet
//! ```
//!
//! The boot epoch is raised and made durable before anything is written, so that what a former start left
//! half done can always be told from what this one writes.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::StorageError;
use crate::format::segment::SegmentHeader;
use crate::format::{
    get_u32, get_u64, is_known_version, put_u32, put_u64, DataUuid, ALIGN, FORMAT_VERSION,
};

const META_MAGIC: u64 = u64::from_le_bytes(*b"FXLMETA1");
const CRC_AT: usize = ALIGN - 4;

/// Highest sequence of a segment: so many of the smallest were never written to any device. What has a higher
/// number in its name is no segment.
pub const SEQUENCE_MAX: u64 = (1 << 48) - 1;

/// Paths inside a data directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    dir: PathBuf,
}

impl Layout {
    /// The layout of `dir`.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// The directory itself.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn meta(&self) -> PathBuf {
        self.dir.join("meta")
    }

    /// The directory above all cores' logs.
    pub fn core_logs(&self) -> PathBuf {
        self.dir.join("core-log")
    }

    /// The directory of one core's log.
    pub fn core(&self, core: u16) -> PathBuf {
        self.core_logs().join(core.to_string())
    }

    /// One segment.
    pub fn segment(&self, core: u16, seq: u64) -> PathBuf {
        self.core(core).join(format!("seg-{seq:016x}.fxl"))
    }

    /// The record of a core's freed segments.
    pub fn freed(&self, core: u16) -> PathBuf {
        self.core(core).join("freed")
    }

    /// A segment while it is rewritten.
    pub fn rewriting(&self, core: u16, seq: u64) -> PathBuf {
        self.core(core).join(format!("rewrite-{seq:016x}.fxs"))
    }

    /// Core directories present, ascending.
    pub fn cores(&self) -> Result<Vec<u16>, StorageError> {
        let root = self.core_logs();
        let mut cores = Vec::new();
        for entry in read_dir(&root)? {
            let name = entry.to_str();
            let core: Option<u16> = name.and_then(|name| name.parse().ok());
            // Other spellings of the number, and what is no directory, are none of ours.
            let Some(core) = core.filter(|core| name == Some(core.to_string().as_str())) else {
                continue;
            };
            if is_dir(&root.join(&entry))? {
                cores.push(core);
            }
        }
        cores.sort_unstable();
        Ok(cores)
    }

    /// Sequences of the segment files of a core, ascending.
    pub fn segments(&self, core: u16) -> Result<Vec<u64>, StorageError> {
        let mut seqs = Vec::new();
        for entry in read_dir(&self.core(core))? {
            if let Some(seq) = entry.to_str().and_then(parse_segment_name) {
                seqs.push(seq);
            }
        }
        seqs.sort_unstable();
        Ok(seqs)
    }

    /// Fails when something that is no file has the name of one: it is not ours, and neither can be read nor goes.
    pub fn check_files(&self, core: u16) -> Result<(), StorageError> {
        let dir = self.core(core);
        for name in read_dir(&dir)? {
            let Some(name) = name.to_str() else { continue };
            let path = dir.join(name);
            let found = match std::fs::metadata(&path) {
                Ok(found) => found,
                // A running broker took it away.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(StorageError::io("looking at", path, error)),
            };
            let is_odd = match parse_segment_name(name) {
                // Reading a pipe waits for whoever writes it.
                Some(_) => !found.is_file(),
                None => found.is_dir() && is_name_of_file(name),
            };
            if is_odd {
                return Err(StorageError::NotAFile { path });
            }
        }
        Ok(())
    }

    /// Segments of a core that a start found shorter than they were made.
    pub fn shortened(&self, core: u16) -> Result<BTreeSet<u64>, StorageError> {
        let names = read_dir(&self.core(core))?;
        let names = names.iter().filter_map(|name| name.to_str());
        Ok(names
            .filter_map(|name| parse_name(name, ".short"))
            .collect())
    }

    /// Takes back what was said of segments that were put back whole, or are gone, since: a start may shorten what
    /// has their names now.
    pub fn forget_restored(&self, core: u16) -> Result<(), StorageError> {
        let dir = self.core(core);
        for seq in self.shortened(core)? {
            let path = self.segment(core, seq);
            let is_short = is_short(&path);
            if is_short.map_err(|error| StorageError::io("looking at", path, error))? {
                continue;
            }
            let mark = dir.join(format!("seg-{seq:016x}.short"));
            std::fs::remove_file(&mark)
                .and_then(|()| sync_dir(&dir))
                .map_err(|error| StorageError::io("removing", mark, error))?;
        }
        Ok(())
    }

    /// Says for every later start, durably, that a segment was shorter than it was made before any start
    /// could have shortened it.
    pub fn note_shortened(&self, core: u16, seq: u64) -> Result<(), StorageError> {
        let dir = self.core(core);
        let path = dir.join(format!("seg-{seq:016x}.short"));
        File::create(&path)
            .and_then(|_| sync_dir(&dir))
            .map_err(|error| StorageError::io("creating", path, error))
    }

    /// Files of a core directory that are no segments yet: spares and rewritten ones, whole or not.
    pub fn spares(&self, core: u16) -> Result<Vec<PathBuf>, StorageError> {
        let dir = self.core(core);
        let names = read_dir(&dir)?;
        let is_spare = |name: &&std::ffi::OsString| {
            name.to_str()
                .is_some_and(|name| name.starts_with("spare-") || name.starts_with("rewrite-"))
        };
        Ok(names
            .iter()
            .filter(is_spare)
            .map(|name| dir.join(name))
            .collect())
    }
}

/// Whether a segment is there and shorter than its header says, or too short to have one.
fn is_short(path: &Path) -> std::io::Result<bool> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let len = file.metadata()?.len();
    if len < ALIGN as u64 {
        return Ok(true);
    }
    let mut block = [0; ALIGN];
    file.read_exact_at(&mut block, 0)?;
    // What has no header to compare with is as it was found.
    Ok(SegmentHeader::decode(&block).map_or(true, |header| len < header.segment_bytes))
}

/// Whether a directory has this name. One that cannot be looked at is an error: it may be one.
fn is_dir(path: &Path) -> Result<bool, StorageError> {
    match std::fs::metadata(path) {
        Ok(found) => Ok(found.is_dir()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(StorageError::io("looking at", path, error)),
    }
}

fn read_dir(dir: &Path) -> Result<Vec<std::ffi::OsString>, StorageError> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(StorageError::io("listing", dir, error)),
    };
    entries
        .map(|entry| {
            entry
                .map(|entry| entry.file_name())
                .map_err(|error| StorageError::io("listing", dir, error))
        })
        .collect()
}

/// Whether files with this name are made and removed in a core's directory.
fn is_name_of_file(name: &str) -> bool {
    name == "freed" || name.starts_with("spare-") || name.starts_with("rewrite-")
}

fn parse_segment_name(name: &str) -> Option<u64> {
    parse_name(name, ".fxl")
}

fn parse_name(name: &str, suffix: &str) -> Option<u64> {
    let digits = name.strip_prefix("seg-")?.strip_suffix(suffix)?;
    (digits.len() == 16)
        .then(|| u64::from_str_radix(digits, 16).ok())?
        .filter(|seq| (1..=SEQUENCE_MAX).contains(seq))
}

/// Cores a set of them has room for: what is above is not noted.
const CORES_NOTED: usize = 1024;
const CORES_AT: usize = 40;

/// Cores whose directory was made, durably: one that is missing is lost. Empty in directories of older builds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CoreSet([u64; CORES_NOTED / 64]);

impl CoreSet {
    /// Adds a core; false when it was there or has no room.
    fn add(&mut self, core: u16) -> bool {
        let Some(word) = self.0.get_mut(usize::from(core / 64)) else {
            return false;
        };
        let bit = 1 << (core % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    fn iter(&self) -> impl Iterator<Item = u16> + '_ {
        let is_in = |core: &u16| self.0[usize::from(core / 64)] & (1 << (core % 64)) != 0;
        (0..CORES_NOTED as u16).filter(is_in)
    }

    fn encode(&self, out: &mut [u8]) {
        for (i, word) in self.0.iter().enumerate() {
            put_u64(out, CORES_AT + i * 8, *word);
        }
    }

    fn decode(bytes: &[u8]) -> Self {
        let mut set = Self::default();
        for (i, word) in set.0.iter_mut().enumerate() {
            *word = get_u64(bytes, CORES_AT + i * 8);
        }
        set
    }
}

/// Identity and boot epoch of a data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Meta {
    /// Unique id of the directory.
    pub uuid: DataUuid,
    /// Raised by every start.
    pub boot_epoch: u64,
    /// Cores that have a directory.
    pub cores: CoreSet,
}

impl Meta {
    fn encode(&self) -> Vec<u8> {
        let mut out = vec![0u8; ALIGN];
        put_u64(&mut out, 0, META_MAGIC);
        put_u32(&mut out, 8, FORMAT_VERSION);
        out[16..32].copy_from_slice(&self.uuid);
        put_u64(&mut out, 32, self.boot_epoch);
        self.cores.encode(&mut out);
        let crc = crc32c::crc32c(&out[..CRC_AT]);
        put_u32(&mut out, CRC_AT, crc);
        out
    }

    fn decode(file: &Path, bytes: &[u8]) -> Result<Self, StorageError> {
        let damaged = |reason: &str| StorageError::MetaDamaged {
            file: file.to_owned(),
            reason: reason.to_owned(),
        };
        if bytes.len() < ALIGN {
            return Err(damaged("it is too short"));
        }
        if get_u64(bytes, 0) != META_MAGIC {
            return Err(damaged("it does not start with its magic"));
        }
        if crc32c::crc32c(&bytes[..CRC_AT]) != get_u32(bytes, CRC_AT) {
            return Err(damaged("its checksum does not match"));
        }
        let found = get_u32(bytes, 8);
        if !is_known_version(found) {
            return Err(StorageError::UnknownVersion {
                file: file.to_owned(),
                found,
                known: FORMAT_VERSION,
            });
        }
        let mut uuid = [0u8; 16];
        uuid.copy_from_slice(&bytes[16..32]);
        Ok(Self {
            uuid,
            boot_epoch: get_u64(bytes, 32),
            cores: CoreSet::decode(bytes),
        })
    }

    /// Fails when a directory is gone that was there when this was written.
    fn check_cores(&self, layout: &Layout) -> Result<(), StorageError> {
        let of_cores = self.cores.iter().map(|core| layout.core(core));
        for dir in std::iter::once(layout.core_logs()).chain(of_cores) {
            if !is_dir(&dir)? {
                return Err(StorageError::CoreMissing { dir });
            }
        }
        Ok(())
    }

    /// Reads the meta file; `None` for a directory that never held a broker's data.
    pub fn read(layout: &Layout) -> Result<Option<Self>, StorageError> {
        let path = layout.meta();
        match std::fs::read(&path) {
            Ok(bytes) => {
                let meta = Self::decode(&path, &bytes)?;
                meta.check_cores(layout)?;
                Ok(Some(meta))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                for core in layout.cores()? {
                    if !layout.segments(core)?.is_empty() {
                        return Err(StorageError::MetaMissing {
                            file: path,
                            dir: layout.core_logs(),
                        });
                    }
                }
                Ok(None)
            }
            Err(error) => Err(StorageError::io("reading", path, error)),
        }
    }

    fn write(&self, layout: &Layout) -> Result<(), StorageError> {
        let path = layout.meta();
        let next = layout.dir().join("meta.next");
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&next)?;
            file.write_all(&self.encode())?;
            file.sync_all()?;
            std::fs::rename(&next, &path)?;
            sync_dir(layout.dir())
        };
        write().map_err(|error| StorageError::io("writing", &path, error))
    }
}

/// Makes a directory's entries durable.
pub(crate) fn sync_dir(dir: &Path) -> std::io::Result<()> {
    File::open(dir)?.sync_all()
}

/// A locked data directory with this start's epoch.
#[derive(Debug)]
pub struct DataDir {
    /// Paths.
    pub layout: Layout,
    /// Identity, and the epoch of this start.
    pub meta: Meta,
    /// Cores whose directory is noted.
    noted: Mutex<CoreSet>,
    _lock: File,
}

impl DataDir {
    /// Creates the directory if need be, locks it, and raises the boot epoch.
    pub fn open(dir: &Path) -> Result<Self, StorageError> {
        let data_dir = Self::lock(dir)?;
        data_dir.raise()?;
        Ok(data_dir)
    }

    /// Creates the directory if need be and locks it, for a start of the next epoch: nothing may be written
    /// before that is raised.
    pub(crate) fn lock(dir: &Path) -> Result<Self, StorageError> {
        let layout = Layout::new(dir);
        std::fs::create_dir_all(dir).map_err(|error| StorageError::io("creating", dir, error))?;
        let lock = lock(dir)?;
        let meta = match Meta::read(&layout)? {
            Some(meta) => Meta {
                boot_epoch: meta.boot_epoch + 1,
                ..meta
            },
            None => Meta {
                uuid: fresh_uuid()?,
                boot_epoch: 1,
                cores: CoreSet::default(),
            },
        };
        let core_logs = layout.core_logs();
        std::fs::create_dir_all(&core_logs)
            .map_err(|error| StorageError::io("creating", core_logs, error))?;
        Ok(Self {
            layout,
            meta,
            noted: Mutex::new(meta.cores),
            _lock: lock,
        })
    }

    /// Makes the epoch of this start durable.
    pub(crate) fn raise(&self) -> Result<(), StorageError> {
        // Where there is a meta file there is a directory for core logs, whatever survives a power cut.
        let dir = self.layout.dir();
        sync_dir(dir).map_err(|error| StorageError::io("syncing", dir, error))?;
        self.meta.write(&self.layout)?;
        if let Some(parent) = self.layout.dir().parent() {
            // The directory's own entry; a relative path without a parent is the caller's own directory.
            let parent = if parent.as_os_str().is_empty() {
                Path::new(".")
            } else {
                parent
            };
            sync_dir(parent).map_err(|error| StorageError::io("syncing", parent, error))?;
        }
        Ok(())
    }
}

impl DataDir {
    /// Notes that a core has a directory, once that is durable and before anything is in it. It is an aid
    /// against a loss, and nothing depends on it: it does not keep a start on a full disk from coming up.
    pub(crate) fn note_core(&self, core: u16) {
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        let mut cores = *noted;
        if !cores.add(core) {
            return;
        }
        match (Meta { cores, ..self.meta }).write(&self.layout) {
            Ok(()) => *noted = cores,
            Err(error) => {
                tracing::warn!(core, %error, "that the core has a directory is not noted")
            }
        }
    }
}

fn fresh_uuid() -> Result<DataUuid, StorageError> {
    let mut uuid = [0u8; 16];
    getrandom::fill(&mut uuid).map_err(|error| {
        StorageError::io(
            "reading random bytes for",
            "meta",
            std::io::Error::other(error.to_string()),
        )
    })?;
    Ok(uuid)
}

fn lock(dir: &Path) -> Result<File, StorageError> {
    let path = dir.join("lock");
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(|error| StorageError::io("opening", &path, error))?;
    // SAFETY: flock on a descriptor we own.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
        let error = std::io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EWOULDBLOCK) {
            return Err(StorageError::io("locking", &path, error));
        }
        let mut holder = String::new();
        // The message is better with the process id, but does not need it.
        let read = file.read_to_string(&mut holder).is_ok();
        let holder = holder.trim().to_owned();
        let holder = (read && !holder.is_empty()).then_some(holder);
        return Err(StorageError::Locked {
            dir: dir.to_owned(),
            holder,
        });
    }
    let write = file
        .set_len(0)
        .and_then(|()| write!(file, "{}", std::process::id()));
    write.map_err(|error| StorageError::io("writing", &path, error))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holder_is_refused_and_epochs_rise() {
        let dir = tempfile::tempdir().expect("tempdir");
        let first = DataDir::open(dir.path()).expect("opens");
        assert_eq!(first.meta.boot_epoch, 1);
        let refused = DataDir::open(dir.path()).expect_err("is locked");
        let text = refused.to_string();
        assert!(text.contains("in use by another broker"), "{text}");
        assert!(text.contains(&std::process::id().to_string()), "{text}");
        let uuid = first.meta.uuid;
        drop(first);
        let second = DataDir::open(dir.path()).expect("opens");
        assert_eq!((second.meta.boot_epoch, second.meta.uuid), (2, uuid));
    }

    #[test]
    fn damaged_missing_and_unknown_meta_are_told_apart() {
        let dir = tempfile::tempdir().expect("tempdir");
        drop(DataDir::open(dir.path()).expect("opens"));
        let path = dir.path().join("meta");
        let good = std::fs::read(&path).expect("meta");
        let mut bad = good.clone();
        bad[20] ^= 1;
        std::fs::write(&path, &bad).expect("write");
        assert!(matches!(
            DataDir::open(dir.path()),
            Err(StorageError::MetaDamaged { .. })
        ));
        let mut newer = good;
        put_u32(&mut newer, 8, 7);
        let crc = crc32c::crc32c(&newer[..CRC_AT]);
        put_u32(&mut newer, CRC_AT, crc);
        std::fs::write(&path, &newer).expect("write");
        assert!(matches!(
            DataDir::open(dir.path()),
            Err(StorageError::UnknownVersion { found: 7, .. })
        ));
        std::fs::remove_file(&path).expect("remove");
        let layout = Layout::new(dir.path());
        std::fs::create_dir_all(layout.core(0)).expect("mkdir");
        std::fs::write(layout.segment(0, 1), b"x").expect("write");
        assert!(matches!(
            DataDir::open(dir.path()),
            Err(StorageError::MetaMissing { .. })
        ));
    }

    #[test]
    fn a_missing_core_directory_is_refused_and_nothing_is_made_in_its_place() {
        let dir = tempfile::tempdir().expect("tempdir");
        let data_dir = DataDir::open(dir.path()).expect("opens");
        let layout = data_dir.layout.clone();
        for core in [0, 3, 1023, 1024] {
            std::fs::create_dir(layout.core(core)).expect("mkdir");
            data_dir.note_core(core);
        }
        drop(data_dir);
        // Fewer cores, more cores: what a start does not serve stays noted.
        for epoch in 2..4 {
            let again = DataDir::open(dir.path()).expect("opens");
            assert_eq!(again.meta.boot_epoch, epoch);
            assert_eq!(again.meta.cores.iter().collect::<Vec<_>>(), [0, 3, 1023]);
        }
        let is_refused = |missing: &Path| {
            for _ in 0..2 {
                assert!(
                    matches!(DataDir::open(dir.path()), Err(StorageError::CoreMissing { dir }) if dir == missing)
                );
                assert!(Meta::read(&layout).is_err());
                assert!(!missing.exists());
            }
        };
        for core in [0, 3, 1023] {
            std::fs::remove_dir(layout.core(core)).expect("rmdir");
            is_refused(&layout.core(core));
            std::fs::create_dir(layout.core(core)).expect("mkdir");
            assert!(DataDir::open(dir.path()).is_ok(), "given up on purpose");
        }
        std::fs::remove_dir_all(layout.core_logs()).expect("rm");
        is_refused(&layout.core_logs());
    }

    #[test]
    fn a_directory_of_a_build_that_noted_no_cores_is_taken() {
        let dir = tempfile::tempdir().expect("tempdir");
        drop(DataDir::open(dir.path()).expect("opens"));
        let again = DataDir::open(dir.path()).expect("nothing was ever written");
        assert_eq!(again.meta.cores, CoreSet::default());
    }

    #[test]
    fn a_core_has_one_directory_whatever_else_reads_as_its_number() {
        let dir = tempfile::tempdir().expect("tempdir");
        let layout = DataDir::open(dir.path()).expect("opens").layout.clone();
        for name in [
            "0", "00", "+0", "12", "012", "+12", "65535", "65536", "-1", "x",
        ] {
            std::fs::create_dir(layout.core_logs().join(name)).expect("mkdir");
        }
        std::fs::write(layout.core(7), b"no directory").expect("writes");
        assert_eq!(layout.cores().expect("lists"), [0, 12, 65535]);
    }
}
