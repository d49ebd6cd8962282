//! The secret behind stateless resets and address tokens, kept over restarts.
//!
//! A broker that comes back must recognise the connections of its former life: only with the same
//! secret can its resets be understood, and its peers redial at once instead of waiting for their
//! idle timeout.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::quic::SharedKeys;

const FILE_NAME: &str = "quic-secret";

/// Reads the secret of a data directory, or makes one. A file of the wrong size is replaced: the
/// secret protects nothing that outlives a connection.
pub(super) fn load_or_create(data_dir: &Path) -> io::Result<SharedKeys> {
    let path = data_dir.join(FILE_NAME);
    let mut bytes = Vec::new();
    match std::fs::File::open(&path) {
        Ok(file) => {
            file.take(SharedKeys::BYTES as u64 + 1)
                .read_to_end(&mut bytes)?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    if let Ok(secret) = <[u8; SharedKeys::BYTES]>::try_from(bytes.as_slice()) {
        return Ok(SharedKeys::from_bytes(secret));
    }
    let keys = SharedKeys::generate();
    let fresh = data_dir.join(format!("{FILE_NAME}.new"));
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&fresh)?;
    file.write_all(&keys.to_bytes())?;
    file.sync_all()?;
    std::fs::rename(&fresh, &path)?;
    std::fs::File::open(data_dir)?.sync_all()?;
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_secret_is_kept_private_and_mended() {
        let dir = tempfile::tempdir().unwrap();
        let first = load_or_create(dir.path()).unwrap().to_bytes();
        assert_eq!(load_or_create(dir.path()).unwrap().to_bytes(), first);
        let path = dir.path().join(FILE_NAME);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::write(&path, b"short").unwrap();
        let mended = load_or_create(dir.path()).unwrap().to_bytes();
        assert_ne!(mended, first);
        assert_eq!(load_or_create(dir.path()).unwrap().to_bytes(), mended);
    }
}
