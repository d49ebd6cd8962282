//! `compare`: two reports, field by field.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use felix_uring::cli::CommandError;
use serde_json::Value;

/// Flags of `compare`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  \
    # Everything that differs\n  \
    felix-bench compare before.json after.json\n\n  \
    # Everything, and the figures over time as well\n  \
    felix-bench compare --all before.json after.json\n\n\
    The ratio is the second by the first. Runs of different workloads are compared with a warning.")]
pub struct CompareArgs {
    /// The earlier report
    pub a: PathBuf,
    /// The later report
    pub b: PathBuf,
    /// Show equal fields, lists and the place of the run too
    #[arg(long)]
    pub all: bool,
}

/// One field of both.
#[derive(Debug, Clone, PartialEq)]
pub struct Field {
    /// Its path, with dots.
    pub path: String,
    /// In the first; none when it is not there.
    pub a: Option<Value>,
    /// In the second.
    pub b: Option<Value>,
}

impl Field {
    /// The second by the first, of two numbers.
    pub fn ratio(&self) -> Option<f64> {
        let (a, b) = (self.a.as_ref()?.as_f64()?, self.b.as_ref()?.as_f64()?);
        (a != 0.0).then(|| b / a)
    }

    fn differs(&self) -> bool {
        match (
            self.a.as_ref().and_then(Value::as_f64),
            self.b.as_ref().and_then(Value::as_f64),
        ) {
            (Some(a), Some(b)) => a != b,
            _ => self.a != self.b,
        }
    }
}

/// Every leaf of both, those of the first in its order.
pub fn fields(a: &Value, b: &Value) -> Vec<Field> {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    leaves("", a, &mut left);
    leaves("", b, &mut right);
    let find = |list: &[(String, Value)], path: &str| {
        list.iter()
            .find(|(p, _)| p == path)
            .map(|(_, value)| value.clone())
    };
    let mut all: Vec<Field> = left
        .iter()
        .map(|(path, value)| Field {
            path: path.clone(),
            a: Some(value.clone()),
            b: find(&right, path),
        })
        .collect();
    for (path, value) in &right {
        if find(&left, path).is_none() {
            all.push(Field {
                path: path.clone(),
                a: None,
                b: Some(value.clone()),
            });
        }
    }
    all
}

fn leaves(path: &str, value: &Value, out: &mut Vec<(String, Value)>) {
    let join = |key: &str| match path {
        "" => key.to_string(),
        path => format!("{path}.{key}"),
    };
    match value {
        Value::Object(map) => map.iter().for_each(|(k, v)| leaves(&join(k), v, out)),
        Value::Array(list) => (0..)
            .zip(list)
            .for_each(|(i, v): (usize, _)| leaves(&join(&i.to_string()), v, out)),
        leaf => out.push((path.to_string(), leaf.clone())),
    }
}

fn read(path: &Path) -> Result<Value, CommandError> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| CommandError::usage(format!("{}: {e}", path.display())))?;
    let value: Value = serde_json::from_str(&text)
        .map_err(|e| CommandError::usage(format!("{} is not a report: {e}", path.display())))?;
    match value["schema"].is_string() {
        true => Ok(value),
        false => Err(CommandError::usage(format!(
            "{} is not a report of felix-bench: it names no schema",
            path.display()
        ))),
    }
}

/// Shown only when asked for.
fn is_detail(path: &str) -> bool {
    [
        "series.",
        "latency_curve.",
        "host.",
        "rounds.",
        "result.per_shard.",
    ]
    .iter()
    .any(|part| path.starts_with(part))
}

/// `compare`.
pub fn run_compare(args: &CompareArgs, out: &mut dyn Write) -> Result<(), CommandError> {
    let (a, b) = (read(&args.a)?, read(&args.b)?);
    for (what, key) in [("forms", "schema"), ("workloads", "workload")] {
        if a[key] != b[key] {
            eprintln!("felix-bench: the two runs have different {what}; ratios may mean little");
        }
    }
    if a["host"]["name"] != b["host"]["name"] {
        eprintln!("felix-bench: the two runs were on different hosts");
    }
    let text = |value: &Option<Value>| match value {
        None => "-".to_string(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(n)) if n.is_f64() => format!("{:.3}", n.as_f64().unwrap_or(0.0)),
        Some(other) => other.to_string(),
    };
    writeln!(
        out,
        "{:<42} {:>18} {:>18} {:>8}",
        "field", "first", "second", "ratio"
    )
    .map_err(CommandError::failed)?;
    for field in fields(&a, &b) {
        if !args.all && (is_detail(&field.path) || !field.differs()) {
            continue;
        }
        let ratio = field.ratio().map_or(String::new(), |r| format!("{r:.3}"));
        writeln!(
            out,
            "{:<42} {:>18} {:>18} {:>8}",
            field.path,
            text(&field.a),
            text(&field.b),
            ratio
        )
        .map_err(CommandError::failed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_meet_by_path() {
        let a = json!({"result": {"rate": 100.0, "p": {"p50": 2}}, "brokers": [{"cpu": 1.0}], "old": 1});
        let b = json!({"result": {"rate": 150.0, "p": {"p50": 2}}, "brokers": [{"cpu": 0.5}], "new": "x"});
        let all = fields(&a, &b);
        let of = |path: &str| all.iter().find(|f| f.path == path).unwrap();
        assert_eq!(of("result.rate").ratio(), Some(1.5));
        assert_eq!(of("brokers.0.cpu").ratio(), Some(0.5));
        assert!(!of("result.p.p50").differs());
        assert!(of("old").b.is_none() && of("new").a.is_none());
        assert_eq!(of("new").ratio(), None);
        assert_eq!(all.len(), 5);
    }

    #[test]
    fn what_is_no_report_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        std::fs::write(&path, "{}").unwrap();
        assert!(read(&path).unwrap_err().message.contains("no schema"));
        assert!(read(&dir.path().join("none")).is_err());
    }
}
