//! Asks a directory whether it can carry a core log, before anything is stored in it.
//!
//! Finds out whether O_DIRECT works, which alignment it needs, how large one transfer may be, and which mount
//! it is; a refusal says what to do.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::format::ALIGN;
use crate::slab::SlabWriter;

/// Largest transfer used when the device does not say less.
const TRANSFER_MAX: usize = 1 << 20;

/// What a directory can do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DirProbe {
    /// Whether an O_DIRECT write and read of a block worked.
    pub direct_io: bool,
    /// Memory alignment the file system asks for; 0 when it does not say.
    pub memory_align: u32,
    /// Offset and length alignment it asks for; 0 when it does not say.
    pub offset_align: u32,
    /// Largest single transfer to use.
    pub max_transfer_bytes: usize,
    /// Kind of file system.
    pub fs_type: String,
    /// Where it is mounted.
    pub mount: PathBuf,
    /// Free bytes.
    pub free_bytes: u64,
}

/// Why a directory cannot be used, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// O_DIRECT does not work there.
    #[error(
        "{} is on {fs_type} mounted at {}, which does not support direct I/O ({reason}); put the data \
         directory on a local disk (ext4 or xfs)", dir.display(), mount.display()
    )]
    NoDirectIo {
        /// The directory.
        dir: PathBuf,
        /// Kind of file system.
        fs_type: String,
        /// Mount point.
        mount: PathBuf,
        /// The system's answer.
        reason: String,
    },
    /// The device needs a larger alignment than the format has.
    #[error(
        "{} is on {fs_type} mounted at {}, which needs writes aligned to {needed} bytes; this format aligns to \
         4096: use a device with blocks of at most 4096 bytes", dir.display(), mount.display()
    )]
    Alignment {
        /// The directory.
        dir: PathBuf,
        /// Kind of file system.
        fs_type: String,
        /// Mount point.
        mount: PathBuf,
        /// Alignment needed.
        needed: u32,
    },
    /// The directory cannot be written.
    #[error("{} cannot be used: {source}; create it and make it writable for the broker's user", dir.display())]
    Io {
        /// The directory.
        dir: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

/// Probes `dir`, creating it if need be.
pub fn probe(dir: &Path) -> Result<DirProbe, ProbeError> {
    let io = |source| ProbeError::Io {
        dir: dir.to_owned(),
        source,
    };
    std::fs::create_dir_all(dir).map_err(io)?;
    let (fs_type, mount) = mount_of(dir);
    let file = dir.join(".direct-io-probe");
    let tried = try_direct(&file);
    let aligned = alignment(&file).unwrap_or((0, 0));
    drop(std::fs::remove_file(&file));
    match tried {
        Ok(()) => {}
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
            let reason = error.to_string();
            return Err(ProbeError::NoDirectIo {
                dir: dir.to_owned(),
                fs_type,
                mount,
                reason,
            });
        }
        // A full disk does not keep a broker from serving reads; direct I/O shows when space returns.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) => {}
        Err(error) => return Err(io(error)),
    }
    let (memory_align, offset_align) = aligned;
    let needed = memory_align.max(offset_align);
    if needed as usize > ALIGN {
        return Err(ProbeError::Alignment {
            dir: dir.to_owned(),
            fs_type,
            mount,
            needed,
        });
    }
    Ok(DirProbe {
        direct_io: true,
        memory_align,
        offset_align,
        max_transfer_bytes: max_transfer(dir),
        fs_type,
        mount,
        free_bytes: crate::segment_pool::free_bytes(dir).map_err(io)?,
    })
}

fn try_direct(path: &Path) -> io::Result<()> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)?;
    let mut block = SlabWriter::new(2 * ALIGN);
    let bytes = block.tail();
    bytes[..ALIGN].fill(0xa5);
    let (out, back) = bytes.split_at_mut(ALIGN);
    file.write_all_at(out, 0)?;
    file.sync_data()?;
    file.read_exact_at(&mut back[..ALIGN], 0)?;
    if out[..] == back[..ALIGN] {
        Ok(())
    } else {
        Err(io::Error::other(
            "the block read back is not the block written",
        ))
    }
}

/// Memory and offset alignment of direct I/O on a file, if the kernel says.
fn alignment(path: &Path) -> Option<(u32, u32)> {
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes()).ok()?;
    // SAFETY: a zeroed statx is a valid value to be overwritten.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the path is nul-terminated and the struct is ours.
    let answer = unsafe {
        libc::statx(
            libc::AT_FDCWD,
            path.as_ptr(),
            0,
            libc::STATX_DIOALIGN,
            &mut stat,
        )
    };
    (answer == 0 && stat.stx_mask & libc::STATX_DIOALIGN != 0)
        .then_some((stat.stx_dio_mem_align, stat.stx_dio_offset_align))
}

/// The block layer's limit for one transfer, bounded by what is useful.
fn max_transfer(dir: &Path) -> usize {
    let Ok(meta) = std::fs::metadata(dir) else {
        return TRANSFER_MAX;
    };
    let device = meta.dev();
    let node = format!(
        "/sys/dev/block/{}:{}",
        libc::major(device),
        libc::minor(device)
    );
    // A partition has no queue of its own; its disk is one up.
    let candidates = [
        format!("{node}/queue/max_sectors_kb"),
        format!("{node}/../queue/max_sectors_kb"),
    ];
    let limit = candidates.iter().find_map(|path| {
        std::fs::read_to_string(path)
            .ok()?
            .trim()
            .parse::<usize>()
            .ok()
    });
    let limit = limit.map_or(TRANSFER_MAX, |kb| kb.saturating_mul(1024));
    (limit.min(TRANSFER_MAX) / ALIGN * ALIGN).max(ALIGN)
}

/// File system and mount point of a directory, from the mount table.
fn mount_of(dir: &Path) -> (String, PathBuf) {
    let unknown = ("an unknown file system".to_owned(), PathBuf::from("/"));
    let Ok(dir) = dir.canonicalize() else {
        return unknown;
    };
    let Ok(table) = std::fs::read_to_string("/proc/self/mountinfo") else {
        return unknown;
    };
    let mut best: Option<(usize, String, PathBuf)> = None;
    for line in table.lines() {
        let Some((left, right)) = line.split_once(" - ") else {
            continue;
        };
        let Some(mount) = left.split(' ').nth(4) else {
            continue;
        };
        let mount = PathBuf::from(mount.replace("\\040", " "));
        let depth = mount.components().count();
        let deeper = best.as_ref().is_none_or(|(held, _, _)| depth >= *held);
        if dir.starts_with(&mount) && deeper {
            let fs_type = right.split(' ').next().unwrap_or("unknown").to_owned();
            best = Some((depth, fs_type, mount));
        }
    }
    best.map_or(unknown, |(_, fs_type, mount)| (fs_type, mount))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_directory_works_and_memory_file_systems_get_a_clear_answer() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("tempdir");
        match probe(dir.path()) {
            Ok(found) => {
                assert!(
                    found.direct_io && found.max_transfer_bytes >= ALIGN,
                    "{found:?}"
                );
                assert!(found.max_transfer_bytes <= TRANSFER_MAX && !found.fs_type.is_empty());
            }
            Err(error) => assert!(error.to_string().contains("local disk"), "{error}"),
        }
        assert_eq!(
            std::fs::read_dir(dir.path()).expect("lists").count(),
            0,
            "nothing is left behind"
        );
        if let Ok(memory) = tempfile::tempdir_in("/dev/shm") {
            match probe(memory.path()) {
                Ok(found) => assert_eq!(found.fs_type, "tmpfs"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(
                        text.contains("tmpfs") && text.contains("local disk"),
                        "{text}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let error = probe(Path::new("/proc/no-such-place/data")).expect_err("cannot be made");
        assert!(
            error.to_string().contains("/proc/no-such-place/data"),
            "{error}"
        );
    }
}
