//! Writing reports to files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use super::host::{commit, utc_now};

/// Writes one JSON object, whole or not at all.
pub fn write_json(path: &Path, report: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(report)?;
    text.push('\n');
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent).with_context(|| format!("{}", parent.display()))?;
    }
    let staged = path.with_extension("tmp");
    std::fs::write(&staged, text)
        .and_then(|()| std::fs::rename(&staged, path))
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// The directory of recorded runs of today, this host and this commit.
pub fn record_dir() -> PathBuf {
    let day: String = utc_now().chars().take(10).collect();
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let commit = match commit() {
        none if none.is_empty() => "unknown".to_string(),
        commit => commit,
    };
    let runs = Path::new(env!("CARGO_MANIFEST_DIR")).join("runs");
    // A binary that was moved to another machine records beside where it is started.
    let runs = match runs.parent().is_some_and(Path::is_dir) {
        true => runs,
        false => PathBuf::from("bench/runs"),
    };
    runs.join(format!("{day}-{}-{commit}", host.trim()))
}
