//! The manual agrees with the program.
#![cfg(feature = "runtime")]

use felix_uring::cli::Exit;
use felix_uring::metrics;

fn manual() -> (std::path::PathBuf, String) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operations.md");
    let text = std::fs::read_to_string(&path).expect("the manual is readable");
    (path, text)
}

const MARK: &str = "<!-- metrics: made by `metrics::reference`; a test compares -->\n";

/// With `UPDATE_DOCS=1` the table is written instead of compared.
#[test]
fn every_metric_is_in_the_manual() {
    let (path, text) = manual();
    let (before, table) = text.split_once(MARK).expect("the manual has the mark");
    let wanted = metrics::reference();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{MARK}{wanted}")).expect("the manual is writable");
        return;
    }
    assert_eq!(
        table, wanted,
        "run UPDATE_DOCS=1 cargo test --test cli_docs"
    );
}

#[test]
fn every_exit_status_is_in_the_manual() {
    let (_, text) = manual();
    for exit in [
        Exit::Done,
        Exit::Failed,
        Exit::Usage,
        Exit::Unreachable,
        Exit::Refused,
        Exit::Damaged,
        Exit::HostUnfit,
    ] {
        assert!(
            text.contains(&format!("\n| {} | ", exit.code())),
            "{exit:?}"
        );
    }
}

#[test]
fn metrics_the_manual_speaks_of_exist() {
    let (_, text) = manual();
    let (prose, table) = text.split_once(MARK).expect("the manual has the mark");
    let known = format!("{table}`felix_ready``felix_build_info`");
    for word in prose.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
        if word.starts_with("felix_") {
            assert!(known.contains(&format!("`{word}`")), "{word}");
        }
    }
}
