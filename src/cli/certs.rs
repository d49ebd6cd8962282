//! `certs`: a development authority, broker certificates and a tenant signing key.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use super::exit::{output_error, CommandError, Exit};
use crate::cluster::{open_or_create_signing_key, Authority, PkiError};
use crate::ids::NodeId;

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    # An authority and certificates for three brokers\n  \
    felix-uring certs --dir pki --node node-1 --node node-2 --node node-3\n\n  \
    # A broker that clients reach under a name and an address of its own\n  \
    felix-uring certs --dir pki --node node-1 --name broker.example --name 10.0.0.7\n\n  \
    # A signing key for tokens, and the public half for the catalog\n  \
    felix-uring certs --dir pki --signing-key k1 --json\n\n\
    Keys are written with mode 0600. What exists in the directory (authority, signing key) is\n\
    used again; broker certificates are made anew. For development, not for production.")]
pub struct CertsArgs {
    /// Directory for everything; made if it does not exist
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Node id to make certificates for, in DIR/NODE; may be repeated
    #[arg(long = "node", value_name = "NODE")]
    nodes: Vec<String>,
    /// Another DNS name or address for the client certificates; may be repeated
    #[arg(long = "name", value_name = "NAME")]
    names: Vec<String>,
    /// Make an Ed25519 signing key with this key id, as DIR/KID.pem and DIR/KID.jwks.json
    #[arg(long, value_name = "KID")]
    signing_key: Option<String>,
    /// Days the broker certificates are valid
    #[arg(long, default_value_t = 365, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..=3650))]
    days: u32,
    /// Print one JSON object with the paths
    #[arg(long)]
    json: bool,
}

/// Makes what was asked for and prints where it is.
pub fn run(args: &CertsArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let node_ids = args
        .nodes
        .iter()
        .map(|text| NodeId::new(text).map_err(CommandError::usage))
        .collect::<Result<Vec<_>, _>>()?;
    let authority = Authority::open_or_create(&args.dir, args.days).map_err(pki_error)?;
    let mut nodes = Vec::new();
    for node in &node_ids {
        let files = authority
            .issue_node(&args.dir.join(node.as_str()), node, &args.names)
            .map_err(pki_error)?;
        nodes.push(json!({
            "node_id": node.as_str(),
            "client_cert": files.client_cert,
            "client_key": files.client_key,
            "peer_cert": files.peer_cert,
            "peer_key": files.peer_key,
        }));
    }
    let mut report = json!({ "ca": authority.ca_path(), "nodes": nodes });
    if let Some(kid) = &args.signing_key {
        let (key, jwks) = signing_key(args, kid)?;
        report["signing_key"] = json!(key);
        report["jwks"] = json!(jwks);
    }
    if args.json {
        writeln!(out, "{report}").map_err(output_error)?;
    } else {
        print_text(&report, out).map_err(output_error)?;
    }
    Ok(Exit::Done)
}

fn signing_key(args: &CertsArgs, kid: &str) -> Result<(PathBuf, PathBuf), CommandError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if kid.is_empty() || !kid.chars().all(plain) {
        return Err(CommandError::usage(format!(
            "key id {kid:?} would not make a file name; use letters, digits, '-' and '_'"
        )));
    }
    let key_path = args.dir.join(format!("{kid}.pem"));
    let key = open_or_create_signing_key(&key_path).map_err(pki_error)?;
    let jwks_path = args.dir.join(format!("{kid}.jwks.json"));
    std::fs::write(&jwks_path, key.to_jwks(kid))
        .map_err(|e| CommandError::failed(format!("{}: {e}", jwks_path.display())))?;
    Ok((key_path, jwks_path))
}

fn print_text(report: &serde_json::Value, out: &mut dyn Write) -> std::io::Result<()> {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_string();
    writeln!(out, "CA            {}", text(&report["ca"]))?;
    for node in report["nodes"].as_array().into_iter().flatten() {
        writeln!(out, "{}", text(&node["node_id"]))?;
        for key in ["client_cert", "client_key", "peer_cert", "peer_key"] {
            writeln!(out, "  {key:<12}{}", text(&node[key]))?;
        }
    }
    for key in ["signing_key", "jwks"] {
        if let Some(path) = report.get(key) {
            writeln!(out, "{key:<14}{}", text(path))?;
        }
    }
    Ok(())
}

pub(super) fn pki_error(error: PkiError) -> CommandError {
    match error {
        PkiError::Unusable { .. } => CommandError::usage(error),
        PkiError::File { .. } | PkiError::Generate(_) | PkiError::Random(_) => {
            CommandError::failed(error)
        }
    }
}
