//! `status`: what running brokers say about themselves.

use std::fmt::Write as _;
use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use clap::Args;
use serde_json::{json, Value};

use super::exit::{output_error, CommandError, Exit};
use crate::admin::{get, HttpError};

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    # One broker, for people\n  \
    felix-uring status 127.0.0.1:9600\n\n  \
    # Wait in a script until a broker takes work\n  \
    until felix-uring status 127.0.0.1:9600 --ready; do sleep 0.2; done\n\n  \
    # Bytes appended by each broker of a cluster\n  \
    felix-uring status 127.0.0.1:9600 127.0.0.1:9601 --json | jq .storage.appended_bytes")]
pub struct StatusArgs {
    /// Admin address of a broker, host:port; may be repeated
    #[arg(required = true, value_name = "ADDR")]
    addrs: Vec<String>,
    /// Only ask whether the broker takes work: status 0 when every one does, 1 when one does not
    #[arg(long)]
    ready: bool,
    /// Print one JSON object a broker and line
    #[arg(long)]
    json: bool,
    /// Give up after this many milliseconds
    #[arg(long, default_value_t = 3000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=600_000))]
    timeout_ms: u64,
}

/// Asks each broker in turn; the first that cannot be asked decides the exit status, after all
/// have been tried.
pub fn run(args: &StatusArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let addrs = args
        .addrs
        .iter()
        .map(|text| resolve(text))
        .collect::<Result<Vec<_>, _>>()?;
    let timeout = Duration::from_millis(args.timeout_ms);
    let mut exit = Exit::Done;
    let mut problems = Vec::new();
    for addr in addrs {
        match one(args, addr, timeout) {
            Ok((line, ready)) => {
                writeln!(out, "{line}").map_err(output_error)?;
                if args.ready && !ready && exit == Exit::Done {
                    exit = Exit::Failed;
                }
            }
            Err(error) => {
                exit = Exit::Unreachable;
                problems.push(error.to_string());
            }
        }
    }
    if problems.is_empty() {
        Ok(exit)
    } else {
        Err(CommandError::new(exit, problems.join("\n")))
    }
}

fn resolve(text: &str) -> Result<SocketAddr, CommandError> {
    text.to_socket_addrs()
        .ok()
        .and_then(|mut found| found.next())
        .ok_or_else(|| {
            CommandError::usage(format!(
                "{text:?} is not an address; write host:port, for example 127.0.0.1:9600"
            ))
        })
}

fn one(
    args: &StatusArgs,
    addr: SocketAddr,
    timeout: Duration,
) -> Result<(String, bool), HttpError> {
    if args.ready {
        let answer = get(addr, "/ready", timeout)?;
        let ready = answer.status == 200;
        let value: Value = serde_json::from_str(&answer.body)
            .unwrap_or_else(|_| json!({ "ready": ready, "reasons": [answer.body.trim()] }));
        let line = if args.json {
            value.to_string()
        } else {
            ready_text(addr, ready, &value)
        };
        return Ok((line, ready));
    }
    let answer = get(addr, "/status", timeout)?;
    let value: Value = serde_json::from_str(&answer.body).map_err(|_| HttpError::NotHttp {
        addr,
        why: "/status is not JSON: is this a broker's admin address?",
    })?;
    let ready = value["state"] == "ready";
    let line = if args.json {
        value.to_string()
    } else {
        status_text(&value)
    };
    Ok((line, ready))
}

fn ready_text(addr: SocketAddr, ready: bool, value: &Value) -> String {
    let list = |key: &str| -> String {
        let lines = value[key].as_array().into_iter().flatten();
        let lines: Vec<&str> = lines.filter_map(Value::as_str).collect();
        lines.join("; ")
    };
    match (ready, list("log_failures")) {
        (false, _) => format!("{addr}: not ready: {}", list("reasons")),
        (true, failures) if failures.is_empty() => format!("{addr}: ready"),
        (true, failures) => format!("{addr}: ready, but {failures}"),
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".into(),
        other => other.to_string(),
    }
}

fn mebibytes(value: &Value) -> String {
    format!(
        "{:.1} MiB",
        value.as_f64().unwrap_or(0.0) / f64::from(1 << 20)
    )
}

/// A page a person can read; scripts use `--json`.
fn status_text(status: &Value) -> String {
    let mut page = String::new();
    // Writing to a String cannot fail.
    let mut line = |name: &str, value: String| {
        let _ = writeln!(page, "{name:<12}{value}");
    };
    line(
        "node",
        format!(
            "{}  {}  pid {}  up {:.0} s  version {}",
            text(&status["node_id"]),
            text(&status["state"]),
            text(&status["pid"]),
            status["uptime_s"].as_f64().unwrap_or(0.0),
            text(&status["version"])
        ),
    );
    for reason in status["reasons"].as_array().into_iter().flatten() {
        line("  reason", text(reason));
    }
    line(
        "listening",
        format!(
            "clients {}  brokers {}",
            text(&status["client_addr"]),
            text(&status["internal_addr"])
        ),
    );
    let process = &status["process"];
    line(
        "process",
        format!(
            "{:.1} s CPU  {} resident at most",
            process["cpu_s"].as_f64().unwrap_or(0.0),
            mebibytes(&process["max_rss_bytes"])
        ),
    );
    let storage = &status["storage"];
    line(
        "storage",
        format!(
            "{} records in {} commits  {} appended  {} free  {} logs halted",
            text(&storage["records"]),
            text(&storage["fsyncs"]),
            mebibytes(&storage["appended_bytes"]),
            mebibytes(&storage["free_bytes"]),
            text(&storage["failed_logs"])
        ),
    );
    let catalog = &status["catalog"];
    if !catalog.is_null() {
        line(
            "catalog",
            format!(
                "version {}  {} nodes  {} streams  {} caches  {} shards led here",
                text(&catalog["version"]),
                text(&catalog["nodes"]),
                text(&catalog["streams"]),
                text(&catalog["caches"]),
                text(&catalog["shards_led"])
            ),
        );
        if let Some(error) = catalog["error"].as_str() {
            line("  not taken", error.to_string());
        }
    }
    for core in status["cores"].as_array().into_iter().flatten() {
        line(
            &format!("core {}", text(&core["core"])),
            format!(
                "{}  clients {}  brokers {}  publishes in flight {}  shards {}",
                text(&core["phase"]),
                text(&core["client_connections"]),
                text(&core["peer_connections"]),
                text(&core["publishes_in_flight"]),
                core["shards"].as_array().map_or(0, Vec::len)
            ),
        );
    }
    for peer in status["peers"].as_array().into_iter().flatten() {
        line(
            "peer",
            format!(
                "{} ({}) from core {}: {}{}{}",
                text(&peer["node_id"]),
                text(&peer["address"]),
                text(&peer["core"]),
                text(&peer["state"]),
                peer["path"]["mtu_bytes"]
                    .as_u64()
                    .map(|bytes| format!(", packets of {bytes} bytes"))
                    .unwrap_or_default(),
                peer["last_error"]
                    .as_str()
                    .map(|e| format!(", {e}"))
                    .unwrap_or_default()
            ),
        );
    }
    for failure in status["failures"].as_array().into_iter().flatten() {
        line(
            "FAILED",
            format!(
                "{}: {}; {}",
                text(&failure["shard"]),
                text(&failure["error"]),
                text(&failure["remedy"])
            ),
        );
    }
    page.trim_end().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::{AdminServer, NodeInfo, ShardFailure, SharedState};
    use crate::metrics::MetricsHub;

    fn ask(addr: &str, ready: bool, json: bool) -> (Result<Exit, CommandError>, String) {
        let args = StatusArgs {
            addrs: vec![addr.to_string()],
            ready,
            json,
            timeout_ms: 3000,
        };
        let mut out = Vec::new();
        let result = run(&args, &mut out);
        (result, String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_broker_is_asked_and_its_failures_shown() {
        let info = NodeInfo {
            node_id: "n1".into(),
            cores: 1,
            ..NodeInfo::default()
        };
        let state = SharedState::new(info, MetricsHub::with_cores(1));
        let server = AdminServer::start(([127, 0, 0, 1], 0).into(), state.clone()).unwrap();
        let addr = server.local_addr().to_string();

        let (result, text) = ask(&addr, true, false);
        assert_eq!(result.unwrap(), Exit::Failed);
        assert!(text.contains("not ready: the broker is starting"), "{text}");

        state.release_start();
        state.publish_core(
            0,
            crate::admin::CoreSnapshot {
                phase: "serving".into(),
                failures: vec![ShardFailure {
                    shard: "stream:t/n/s#0".into(),
                    error: "a flush failed".into(),
                    remedy: "replace the disk".into(),
                }],
                ..Default::default()
            },
        );
        assert_eq!(ask(&addr, true, true).0.unwrap(), Exit::Done);
        let (_, text) = ask(&addr, false, false);
        assert!(text.contains("core 0      serving"), "{text}");
        assert!(text.contains("stream:t/n/s#0: a flush failed; replace the disk"));
        let (_, json) = ask(&addr, false, true);
        assert!(serde_json::from_str::<Value>(&json).is_ok(), "{json}");

        let mut failed = crate::admin::CoreSnapshot::default();
        failed.storage.failure = Some("a flush failed".into());
        state.publish_core(0, failed);
        let (result, text) = ask(&addr, true, false);
        assert_eq!(result.unwrap(), Exit::Failed);
        let why = "not ready: the log of core 0 has failed and takes no writes until a restart";
        assert!(text.contains(why), "{text}");
    }

    #[test]
    fn nobody_there_is_status_3_and_nonsense_status_2() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        drop(listener);
        assert_eq!(
            ask(&addr, false, false).0.unwrap_err().exit,
            Exit::Unreachable
        );
        assert_eq!(
            ask("nonsense", false, false).0.unwrap_err().exit,
            Exit::Usage
        );
    }
}
