//! `certs` and `token` together: what one makes, the other signs with and a broker accepts.
#![cfg(feature = "runtime")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use felix_uring::auth::{Action, Resource, Verifier};
use felix_uring::catalog::CatalogFile;
use serde_json::Value;

fn felix(args: &[&str]) -> String {
    let out = Command::new(env!("CARGO_BIN_EXE_felix-uring"))
        .args(args)
        .output()
        .expect("the binary runs");
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{args:?}: {stderr}");
    String::from_utf8(out.stdout).unwrap()
}

fn certs(dir: &Path) -> Value {
    let dir = dir.to_str().unwrap();
    let out = felix(&[
        "certs",
        "--dir",
        dir,
        "--node",
        "node-1",
        "--node",
        "node-2",
        "--signing-key",
        "k1",
        "--json",
    ]);
    serde_json::from_str(&out).unwrap()
}

#[test]
fn a_token_verifies_with_the_key_set_that_certs_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let made = certs(dir.path());
    let catalog_path = dir.path().join("catalog.toml");
    std::fs::write(
        &catalog_path,
        "[[node]]\nid = \"node-1\"\nclient = \"127.0.0.1:5000\"\ninternal = \"127.0.0.1:5001\"\n\
         [[tenant]]\nid = \"t1\"\njwks_file = \"k1.jwks.json\"\n",
    )
    .unwrap();
    let catalog = CatalogFile::load(&catalog_path).unwrap().catalog;
    let mut verifier = Verifier::new(&catalog, 16);
    let key = made["signing_key"].as_str().unwrap();

    let line = felix(&[
        "token",
        "--tenant",
        "t1",
        "--key-file",
        key,
        "--ttl",
        "10m",
        "--json",
    ]);
    let minted: Value = serde_json::from_str(&line).unwrap();
    let (iat, exp) = (
        minted["iat"].as_u64().unwrap(),
        minted["exp"].as_u64().unwrap(),
    );
    assert_eq!(exp - iat, 600);
    let token = minted["token"].as_str().unwrap();
    let grant = verifier.verify(token, "t1", iat).unwrap();
    let events = Resource::Stream {
        tenant: "t1",
        namespace: "default",
        stream: "events",
    };
    assert!(grant.allows(Action::StreamPublish, &events));
    verifier.verify(token, "t2", iat).unwrap_err();
    verifier.verify(token, "t1", exp + 3600).unwrap_err();

    let narrow = felix(&[
        "token",
        "--tenant",
        "t1",
        "--key-file",
        key,
        "--perm",
        "stream.subscribe:stream:t1/default/events",
    ]);
    let grant = verifier.verify(narrow.trim(), "t1", iat).unwrap();
    assert!(!grant.allows(Action::StreamPublish, &events));
    assert!(grant.allows(Action::StreamSubscribe, &events));
}

#[test]
fn private_files_are_private_and_a_second_run_keeps_what_others_trust() {
    let dir = tempfile::tempdir().unwrap();
    let first = certs(dir.path());
    let read = |value: &Value| std::fs::read(value.as_str().unwrap()).unwrap();
    let (ca, key) = (read(&first["ca"]), read(&first["signing_key"]));
    let second = certs(dir.path());
    assert_eq!(read(&second["ca"]), ca);
    assert_eq!(read(&second["signing_key"]), key);
    for entry in walk(dir.path()) {
        let name = entry.file_name().unwrap().to_string_lossy().into_owned();
        let mode = std::fs::metadata(&entry).unwrap().permissions().mode() & 0o777;
        let text = std::fs::read_to_string(&entry).unwrap();
        let secret = text.contains("PRIVATE KEY");
        assert_eq!(secret, mode == 0o600, "{name} has mode {mode:o}");
    }
}

fn walk(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(walk(&path));
        } else {
            files.push(path);
        }
    }
    files
}
