//! What the standard library does not say about files.

use std::io;
use std::path::Path;

/// Gives a file a name that nothing has: whatever has it may be the only copy of records.
pub(super) fn rename_to_new(from: &Path, to: &Path) -> io::Result<()> {
    let c_path = |path: &Path| {
        std::ffi::CString::new(path.as_os_str().as_encoded_bytes())
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
    };
    let (old, new) = (c_path(from)?, c_path(to)?);
    // SAFETY: both paths are nul-terminated and live until the call returns.
    let renamed = unsafe {
        libc::renameat2(
            libc::AT_FDCWD,
            old.as_ptr(),
            libc::AT_FDCWD,
            new.as_ptr(),
            libc::RENAME_NOREPLACE,
        )
    };
    if renamed == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // Not every file system can refuse to replace. A second name does, and the first one goes then.
        Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP) => {
            std::fs::hard_link(from, to)?;
            std::fs::remove_file(from)
        }
        _ => Err(error),
    }
}

/// Bytes an unprivileged process may still use on the file system of `dir`.
pub fn free_bytes(dir: &Path) -> io::Result<u64> {
    let path = std::ffi::CString::new(dir.as_os_str().as_encoded_bytes())
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: a zeroed statvfs is a valid value to be overwritten.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path is nul-terminated and the struct is ours.
    if unsafe { libc::statvfs(path.as_ptr(), &mut stat) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}
