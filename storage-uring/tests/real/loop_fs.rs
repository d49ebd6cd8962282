//! A small file system in a file: of a kind and sector size of our choice, and open to having its power cut.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Ext4,
    Xfs,
}

/// A mounted file system in a file; gone when dropped.
pub struct LoopFs {
    image: PathBuf,
    device: String,
    pub at: PathBuf,
    _dir: tempfile::TempDir,
}

fn did(program: &str, args: &[&str]) -> Result<String, String> {
    let output = Command::new(program)
        .args(args)
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    } else {
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("{program} {args:?}: {said}"))
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

impl LoopFs {
    /// Makes one of `bytes` with sectors of `sector` bytes. Where that cannot be done the caller is to skip,
    /// loudly; in CI only a missing program is a reason.
    pub fn make(kind: Kind, bytes: u64, sector: u32) -> Option<Self> {
        match Self::try_make(kind, bytes, sector) {
            Ok(made) => Some(made),
            Err(why)
                if std::env::var("CI").as_deref() == Ok("true")
                    && !why.contains("No such file") =>
            {
                panic!("a {kind:?} in a file cannot be mounted: {why}")
            }
            Err(why) => {
                eprintln!("SKIPPED: a {kind:?} in a file with {sector}-byte sectors cannot be mounted: {why}");
                None
            }
        }
    }

    fn try_make(kind: Kind, bytes: u64, sector: u32) -> Result<Self, String> {
        let dir = crate::common::disk_dir();
        let (image, at) = (dir.path().join("image"), dir.path().join("mounted"));
        std::fs::create_dir(&at).map_err(|error| error.to_string())?;
        let file = std::fs::File::create(&image).map_err(|error| error.to_string())?;
        file.set_len(bytes).map_err(|error| error.to_string())?;
        let device = attach(&image, sector)?;
        // From here on dropping takes it all down again.
        let made = Self {
            image,
            device,
            at,
            _dir: dir,
        };
        match kind {
            Kind::Ext4 => did("mkfs.ext4", &["-q", "-F", "-m", "0", &made.device])?,
            Kind::Xfs => did("mkfs.xfs", &["-q", "-f", &made.device])?,
        };
        made.mount(kind)?;
        Ok(made)
    }

    fn mount(&self, kind: Kind) -> Result<(), String> {
        // What the file system may still hold back is to be held back for long, not for 5 seconds.
        let options = match kind {
            Kind::Ext4 => "commit=600",
            Kind::Xfs => "rw",
        };
        did("mount", &["-o", options, &self.device, &text(&self.at)]).map(drop)
    }

    /// What a power cut at this moment leaves, as a file system of its own: everything the device was sent,
    /// and nothing the file system holds in memory.
    pub fn power_cut(&self, kind: Kind, sector: u32) -> Self {
        let dir = crate::common::disk_dir();
        let (image, at) = (dir.path().join("image"), dir.path().join("mounted"));
        std::fs::create_dir(&at).expect("a directory");
        std::fs::copy(&self.image, &image).expect("copies");
        let device = attach(&image, sector).unwrap_or_else(|e| panic!("{e}"));
        let left = Self {
            image,
            device,
            at,
            _dir: dir,
        };
        let mounted = match kind {
            Kind::Ext4 => left.mount(kind),
            // The copy has the same id as the original, which is mounted.
            Kind::Xfs => did("mount", &["-o", "nouuid", &left.device, &text(&left.at)]).map(drop),
        };
        mounted.unwrap_or_else(|e| panic!("{e}"));
        left
    }

    /// From here on every write is refused, as after the kernel met an error.
    pub fn make_read_only(&self) {
        let done = did("mount", &["-o", "remount,ro", &text(&self.at)]);
        done.unwrap_or_else(|e| panic!("{e}"));
    }

    /// Takes all the space but about `leave` bytes.
    pub fn fill(&self, leave: u64) -> PathBuf {
        let filler = self.at.join("filler");
        let free = storage_uring::segment_pool::free_bytes(&self.at).expect("statvfs");
        let size = free.saturating_sub(leave).to_string();
        let taken = did("fallocate", &["-l", &size, &text(&filler)]);
        taken.unwrap_or_else(|e| panic!("{e}"));
        filler
    }
}

fn attach(image: &Path, sector: u32) -> Result<String, String> {
    let sector = sector.to_string();
    did(
        "losetup",
        &["--find", "--show", "--sector-size", &sector, &text(image)],
    )
}

impl Drop for LoopFs {
    fn drop(&mut self) {
        // What stays is the system's to report; the test has said what it had to say.
        drop(did("umount", &["-l", &text(&self.at)]));
        drop(did("losetup", &["--detach", &self.device]));
    }
}
