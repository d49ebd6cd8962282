//! `cluster up`: a local cluster in one command.

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::Value;

use super::exit::{output_error, CommandError, Exit};
use crate::cluster::{
    BrokerProgram, Cluster, ClusterError, ClusterSpec, NodeExit, PkiError, ShardedSpec,
};

/// How often signals and brokers are looked at.
const WATCH_STEP: Duration = Duration::from_millis(50);

#[derive(Debug, Args)]
pub struct ClusterArgs {
    #[command(subcommand)]
    command: ClusterCommand,
}

#[derive(Debug, Subcommand)]
enum ClusterCommand {
    /// Start a cluster on this machine; Ctrl-C stops it
    #[command(after_help = "Examples:\n  \
        # Three brokers; prints a first publish to copy\n  \
        felix-uring cluster up --nodes 3 --dir /tmp/felix\n\n  \
        # A replicated stream of 8 shards beside the standard one\n  \
        felix-uring cluster up --nodes 3 --dir /tmp/felix --shards 8 --replicas 3\n\n  \
        # For a script: the first line says where everything is\n  \
        felix-uring cluster up --nodes 2 --dir /tmp/felix --json\n\n\
        The directory keeps the CA, the signing key, the catalog and every broker's data and log;\n\
        starting again in it goes on with the same data on new ports. Not for production.")]
    Up(UpArgs),
}

#[derive(Debug, Args)]
struct UpArgs {
    /// How many brokers
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: u16,
    /// Directory for everything the cluster writes
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Data cores of each broker
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    cores_per_node: u16,
    /// Add a stream named "sharded" with this many shards
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    shards: Option<u32>,
    /// Brokers that hold each shard
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=9))]
    replicas: u16,
    /// Submissions in flight a core's ring can hold
    #[arg(long, value_name = "N")]
    queue_depth: Option<u32>,
    /// How long the printed token is valid, in hours
    #[arg(long, default_value_t = 24, value_name = "HOURS", value_parser = clap::value_parser!(u64).range(1..=8760))]
    token_hours: u64,
    /// Seconds a broker may take to become ready
    #[arg(long, default_value_t = 60, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=3600))]
    ready_timeout_s: u64,
    /// Seconds a broker may take to stop before it is killed
    #[arg(long, default_value_t = 30, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=3600))]
    stop_timeout_s: u64,
    /// Print one JSON object when every broker is ready, and nothing else on standard output
    #[arg(long)]
    json: bool,
    /// More flags for every broker, after "--"
    #[arg(last = true, value_name = "SERVE FLAGS")]
    serve_flags: Vec<String>,
}

/// Runs until a signal arrives or a broker dies.
pub fn run(args: &ClusterArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    match &args.command {
        ClusterCommand::Up(args) => up(args, out),
    }
}

fn up(args: &UpArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    if args.replicas > args.nodes {
        return Err(CommandError::usage(format!(
            "--replicas {} needs as many brokers; --nodes is {}",
            args.replicas, args.nodes
        )));
    }
    let stops = watch_signals()?;
    let mut cluster = Cluster::start(&spec_of(args)?).map_err(cluster_error)?;
    let token = cluster
        .token(Duration::from_secs(args.token_hours * 3600))
        .map_err(cluster_error)?;
    let report = cluster.report(&token);
    if args.json {
        writeln!(out, "{report}").map_err(output_error)?;
    } else {
        write!(out, "{}", page(&report)).map_err(output_error)?;
    }
    out.flush().map_err(output_error)?;
    let died = wait_for_end(&mut cluster, &stops);
    stop(&mut cluster, &stops)?;
    match died {
        Some(error) => Err(cluster_error(error)),
        None => Ok(Exit::Done),
    }
}

fn spec_of(args: &UpArgs) -> Result<ClusterSpec, CommandError> {
    let program = BrokerProgram::current().map_err(CommandError::failed)?;
    let mut spec = ClusterSpec::new(&args.dir, usize::from(args.nodes), program);
    spec.cores_per_node = usize::from(args.cores_per_node);
    spec.replicas = args.replicas;
    spec.queue_depth = args.queue_depth;
    spec.extra_args = args.serve_flags.clone();
    spec.ready_timeout = Duration::from_secs(args.ready_timeout_s);
    spec.stop_timeout = Duration::from_secs(args.stop_timeout_s);
    spec.streams = args
        .shards
        .map(|shards| ShardedSpec {
            replicas: args.replicas,
            ..ShardedSpec::new("sharded", shards)
        })
        .into_iter()
        .collect();
    Ok(spec)
}

/// Counts SIGINT and SIGTERM from here on.
fn watch_signals() -> Result<Arc<AtomicUsize>, CommandError> {
    let stops = Arc::new(AtomicUsize::new(0));
    let mut signals = signal_hook::iterator::Signals::new([libc::SIGINT, libc::SIGTERM])
        .map_err(|e| CommandError::failed(format!("signals cannot be watched: {e}")))?;
    let seen = Arc::clone(&stops);
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for _ in signals.forever() {
                seen.fetch_add(1, Ordering::AcqRel);
            }
        })
        .map_err(CommandError::failed)?;
    Ok(stops)
}

/// Waits for a stop signal (`None`) or the first broker that ends by itself.
fn wait_for_end(cluster: &mut Cluster, stops: &AtomicUsize) -> Option<ClusterError> {
    while stops.load(Ordering::Acquire) == 0 {
        for node in cluster.nodes_mut() {
            if let Err(error) = node.check_alive() {
                return Some(error);
            }
        }
        std::thread::sleep(WATCH_STEP);
    }
    None
}

/// Stops in order; a second signal kills at once.
fn stop(cluster: &mut Cluster, stops: &AtomicUsize) -> Result<(), CommandError> {
    let before = stops.load(Ordering::Acquire);
    eprintln!("stopping; once more to kill at once");
    let exits = cluster
        .stop_unless(|| stops.load(Ordering::Acquire) > before)
        .map_err(cluster_error)?;
    let unclean: Vec<String> = exits
        .iter()
        .filter(|exit| !exit.is_clean())
        .map(NodeExit::to_string)
        .collect();
    for exit in &exits {
        eprintln!("{exit}");
    }
    if unclean.is_empty() {
        Ok(())
    } else {
        Err(CommandError::failed(format!(
            "not every broker stopped in order: {}",
            unclean.join("; ")
        )))
    }
}

fn cluster_error(error: ClusterError) -> CommandError {
    match error {
        ClusterError::Pki(PkiError::Unusable { .. }) => CommandError::usage(error),
        other => CommandError::failed(other),
    }
}

/// What a person needs next.
fn page(report: &Value) -> String {
    let text = |key: &str| report[key].as_str().unwrap_or_default().to_string();
    let mut page = String::new();
    for node in report["nodes"].as_array().into_iter().flatten() {
        page.push_str(&format!(
            "{:<10} clients {}  brokers {}  admin http://{}  pid {}\n",
            node["node_id"].as_str().unwrap_or_default(),
            node["client"].as_str().unwrap_or_default(),
            node["internal"].as_str().unwrap_or_default(),
            node["admin"].as_str().unwrap_or_default(),
            node["pid"]
        ));
    }
    let first = report["nodes"][0]["client"].as_str().unwrap_or_default();
    page.push_str(&format!(
        "\nCA           {ca}\nsigning key  {key}\ntenant       {tenant}\n\n\
         A first publish (pip install felix-client):\n\n\
         import felix\n\
         token = \"{token}\"\n\
         with felix.Client(\"{first}\", tenant_id=\"{tenant}\", token=token,\n\
         {pad}server_name=\"localhost\", ca_file=\"{ca}\") as client:\n\
         {pad}print(client.publish(\"{tenant}\", \"{namespace}\", \"{stream}\", b\"hello\"))\n\n\
         Ctrl-C stops the cluster.\n",
        ca = text("ca"),
        key = text("signing_key"),
        tenant = text("tenant"),
        namespace = text("namespace"),
        stream = text("stream"),
        token = text("token"),
        pad = "    ",
    ));
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_page_is_python_that_names_everything() {
        let report = json!({
            "ca": "/c/ca.pem", "signing_key": "/c/k1.pem", "tenant": "t1", "token": "a.b.c",
            "namespace": "default", "stream": "events",
            "nodes": [{ "node_id": "node-1", "client": "127.0.0.1:5000",
                        "internal": "127.0.0.1:5001", "admin": "127.0.0.1:5002", "pid": 7 }],
        });
        let page = page(&report);
        for part in [
            "felix.Client(\"127.0.0.1:5000\", tenant_id=\"t1\", token=token,\n    server_name",
            "ca_file=\"/c/ca.pem\") as client:\n    print(",
            "publish(\"t1\", \"default\", \"events\", b\"hello\")",
            "admin http://127.0.0.1:5002  pid 7",
        ] {
            assert!(page.contains(part), "{part:?} not in:\n{page}");
        }
    }
}
