//! The cases of `tests/mutations` say what the sources say: each text they change stands there exactly once.
//!
//! Whether a change is noticed takes minutes a case and is left to `tests/mutations/run.sh`.

use std::path::Path;

const CASES: &str = include_str!("mutations/cases");

/// One change: the file, and the text that is replaced.
struct Change {
    case: String,
    file: String,
    text: String,
}

fn changes() -> Vec<Change> {
    let (mut case, mut file) = (String::new(), String::new());
    let mut changes = Vec::new();
    let mut lines = CASES.lines();
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("case ") {
            case = name.to_string();
        } else if let Some(path) = line.strip_prefix("file ") {
            file = path.to_string();
        } else if line == "<<<" {
            let text: Vec<&str> = lines.by_ref().take_while(|line| *line != "===").collect();
            changes.push(Change {
                case: case.clone(),
                file: file.clone(),
                text: text.join("\n"),
            });
            // What replaces it may look like anything.
            let _ = lines.by_ref().find(|line| *line == ">>>");
        }
    }
    changes
}

#[test]
fn every_text_stands_exactly_once() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let changes = changes();
    assert!(changes.len() > 90, "{} changes were read", changes.len());
    let wrong: Vec<String> = changes
        .iter()
        .filter_map(|change| {
            let source = std::fs::read_to_string(root.join(&change.file)).unwrap_or_default();
            let times = source.matches(&change.text).count();
            let Change { case, file, .. } = change;
            (times != 1).then(|| format!("{case}: {times} times in {file}"))
        })
        .collect();
    assert_eq!(wrong, Vec::<String>::new());
}
