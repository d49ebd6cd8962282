//! Development certificates and keys: one authority, one client certificate and one peer
//! certificate a broker, one Ed25519 signing key a tenant.
//!
//! For local clusters and tests. Private keys are created with mode 0600 and never printed.
//!
//! Invariants: a leaf is never an authority (TLS clients refuse such a leaf); a peer certificate
//! carries exactly its node id; an existing authority or key in the directory is used again and
//! never overwritten.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::auth::{MintError, SigningKey};
use crate::ids::NodeId;
use crate::tls::{DevCa, IssueRequest, TlsFault};

/// Why certificates could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PkiError {
    #[error("{path}: {source}")]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "{path} is not a usable key or certificate: {why}; move it away to have a new one made"
    )]
    Unusable { path: PathBuf, why: String },
    #[error(transparent)]
    Generate(#[from] TlsFault),
    #[error("a signing key could not be made: {0}")]
    Random(MintError),
}

/// Certificate files of one broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeCertificates {
    pub client_cert: PathBuf,
    pub client_key: PathBuf,
    pub peer_cert: PathBuf,
    pub peer_key: PathBuf,
}

/// The authority of a directory.
pub struct Authority {
    dir: PathBuf,
    ca: DevCa,
    leaf_days: u32,
}

impl Authority {
    /// Uses the authority in `dir`, or makes one (valid ten years). Leaves are valid `leaf_days`.
    pub fn open_or_create(dir: &Path, leaf_days: u32) -> Result<Self, PkiError> {
        std::fs::create_dir_all(dir).map_err(file_error(dir))?;
        let (cert_path, key_path) = (dir.join("ca.pem"), dir.join("ca-key.pem"));
        let ca = match (read(&cert_path)?, read(&key_path)?) {
            (Some(cert_pem), Some(key_pem)) => {
                DevCa::from_pem(&cert_pem, &key_pem).map_err(|fault| unusable(&cert_path, fault))?
            }
            (None, None) => {
                let ca = DevCa::generate("felix-uring development CA")?;
                write_secret(&key_path, &ca.key_pem())?;
                write_public(&cert_path, ca.cert_pem())?;
                ca
            }
            (Some(_), None) => {
                return Err(PkiError::Unusable {
                    path: cert_path,
                    why: "ca-key.pem is missing beside it".into(),
                })
            }
            (None, Some(_)) => {
                return Err(PkiError::Unusable {
                    path: key_path,
                    why: "ca.pem is missing beside it".into(),
                })
            }
        };
        Ok(Self {
            dir: dir.to_path_buf(),
            ca,
            leaf_days,
        })
    }

    /// The file clients and brokers trust.
    pub fn ca_path(&self) -> PathBuf {
        self.dir.join("ca.pem")
    }

    /// Makes both certificates of a broker in `dir`, over what was there. `more_names` are DNS
    /// names or addresses beside `localhost`, the node id and 127.0.0.1.
    pub fn issue_node(
        &self,
        dir: &Path,
        node_id: &NodeId,
        more_names: &[String],
    ) -> Result<NodeCertificates, PkiError> {
        std::fs::create_dir_all(dir).map_err(file_error(dir))?;
        let files = NodeCertificates {
            client_cert: dir.join("client-cert.pem"),
            client_key: dir.join("client-key.pem"),
            peer_cert: dir.join("peer-cert.pem"),
            peer_key: dir.join("peer-key.pem"),
        };
        let mut names = vec![
            "localhost".to_string(),
            node_id.as_str().to_string(),
            "127.0.0.1".to_string(),
        ];
        names.extend(
            more_names
                .iter()
                .filter(|n| !names.contains(n))
                .cloned()
                .collect::<Vec<_>>(),
        );
        self.issue(names, &files.client_cert, &files.client_key)?;
        self.issue(
            vec![node_id.as_str().to_string()],
            &files.peer_cert,
            &files.peer_key,
        )?;
        Ok(files)
    }

    fn issue(&self, names: Vec<String>, cert: &Path, key_path: &Path) -> Result<(), PkiError> {
        let request = IssueRequest::for_broker(&names, i64::from(self.leaf_days));
        let issued = self.ca.issue(&request)?;
        write_secret(key_path, &issued.key_pem)?;
        write_public(cert, &issued.cert_pem)
    }
}

/// Uses the Ed25519 signing key at `path`, or makes one.
pub fn open_or_create_signing_key(path: &Path) -> Result<SigningKey, PkiError> {
    if let Some(pem) = read(path)? {
        return SigningKey::from_pem(&pem).map_err(|error| unusable(path, error));
    }
    let key = SigningKey::generate().map_err(PkiError::Random)?;
    write_secret(path, &key.to_pem())?;
    Ok(key)
}

fn file_error(path: &Path) -> impl FnOnce(std::io::Error) -> PkiError + '_ {
    move |source| PkiError::File {
        path: path.to_path_buf(),
        source,
    }
}

fn unusable(path: &Path, why: impl std::fmt::Display) -> PkiError {
    PkiError::Unusable {
        path: path.to_path_buf(),
        why: why.to_string(),
    }
}

fn read(path: &Path) -> Result<Option<String>, PkiError> {
    let mut text = String::new();
    match File::open(path) {
        Ok(file) => {
            // No key or certificate of ours comes near this.
            file.take(1 << 20)
                .read_to_string(&mut text)
                .map_err(file_error(path))?;
            Ok(Some(text))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(file_error(path)(error)),
    }
}

fn write_secret(path: &Path, text: &str) -> Result<(), PkiError> {
    write_with_mode(path, text, 0o600)
}

pub(super) fn write_public(path: &Path, text: &str) -> Result<(), PkiError> {
    write_with_mode(path, text, 0o644)
}

/// Writes beside the target and renames, so that a reader sees the old file or the new one.
fn write_with_mode(path: &Path, text: &str, mode: u32) -> Result<(), PkiError> {
    let staged = path.with_extension("tmp");
    let result = (|| {
        // The mode only applies to a file that is created, so an old staged one must go.
        match std::fs::remove_file(&staged) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            Ok(()) | Err(_) => {}
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&staged)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&staged, path)
    })();
    result.map_err(file_error(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use x509_parser::prelude::*;

    fn names(path: &Path) -> (Vec<String>, bool) {
        let pem = std::fs::read(path).unwrap();
        let (_, pem) = parse_x509_pem(&pem).unwrap();
        let cert = pem.parse_x509().unwrap();
        let san = cert.subject_alternative_name().unwrap().unwrap();
        let names = san
            .value
            .general_names
            .iter()
            .map(|n| match n {
                GeneralName::DNSName(n) => n.to_string(),
                GeneralName::IPAddress(b) => {
                    b.iter().map(u8::to_string).collect::<Vec<_>>().join(".")
                }
                other => panic!("{other:?}"),
            })
            .collect();
        (names, cert.is_ca())
    }

    #[test]
    fn leaves_carry_their_names_and_keys_are_private() {
        let dir = tempfile::tempdir().unwrap();
        let ca = Authority::open_or_create(dir.path(), 30).unwrap();
        let node = NodeId::new("node-1").unwrap();
        let files = ca
            .issue_node(
                &dir.path().join("node-1"),
                &node,
                &["b.example".into(), "localhost".into()],
            )
            .unwrap();
        let (client, is_ca) = names(&files.client_cert);
        assert_eq!(client, ["localhost", "node-1", "127.0.0.1", "b.example"]);
        assert!(!is_ca);
        assert_eq!(names(&files.peer_cert).0, ["node-1"]);
        for key in [
            &files.client_key,
            &files.peer_key,
            &dir.path().join("ca-key.pem"),
        ] {
            let mode = std::fs::metadata(key).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", key.display());
        }
    }

    #[test]
    fn an_authority_found_again_signs_what_the_old_certificate_verifies() {
        let dir = tempfile::tempdir().unwrap();
        Authority::open_or_create(dir.path(), 30).unwrap();
        let ca_pem = std::fs::read(dir.path().join("ca.pem")).unwrap();
        let again = Authority::open_or_create(dir.path(), 30).unwrap();
        let node = NodeId::new("node-2").unwrap();
        let files = again.issue_node(dir.path(), &node, &[]).unwrap();
        assert_eq!(std::fs::read(again.ca_path()).unwrap(), ca_pem);

        let (_, ca) = parse_x509_pem(&ca_pem).unwrap();
        let ca = ca.parse_x509().unwrap();
        let leaf_pem = std::fs::read(&files.peer_cert).unwrap();
        let (_, leaf) = parse_x509_pem(&leaf_pem).unwrap();
        let leaf = leaf.parse_x509().unwrap();
        assert_eq!(leaf.issuer(), ca.subject());
        assert!(ca.is_ca());
    }

    #[test]
    fn half_an_authority_is_refused_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        Authority::open_or_create(dir.path(), 30).unwrap();
        std::fs::remove_file(dir.path().join("ca-key.pem")).unwrap();
        assert!(matches!(
            Authority::open_or_create(dir.path(), 30),
            Err(PkiError::Unusable { .. })
        ));
    }

    #[test]
    fn a_signing_key_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("k1.pem");
        let first = open_or_create_signing_key(&path).unwrap();
        assert_eq!(open_or_create_signing_key(&path).unwrap().x(), first.x());
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::write(&path, "garbage").unwrap();
        assert!(open_or_create_signing_key(&path).is_err());
    }
}
