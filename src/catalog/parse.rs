//! From the text of a catalog file to a [`Catalog`], with every mistake named.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use toml::de::DeTable;

use crate::ids::{Generation, NameError, NodeId, ShardKind, TenantId};

use super::assignments::{place, read_assignments};
use super::declared::{read_sharded, Declared, MAX_GENERATION};
use super::fault::{CatalogErrors, Faults};
use super::jwks::{decode_x, parse_jwks};
use super::model::{Catalog, HostPort, NodeIdx, NodeInfo, Tenant, TenantKey};
use super::names::{named, plain};
use super::section::{Located, Section};

/// Most nodes of one cluster.
const MAX_NODES: usize = 1024;
/// Most keys of one tenant: each may cost one signature check when a token names none of them.
const MAX_KEYS_PER_TENANT: usize = 16;
/// Most shards of the whole catalog.
const MAX_SHARDS_IN_ALL: u64 = 1_000_000;

/// Reads the text of the catalog file `path`. Key-set files it names are looked up beside it
/// and read through `read`, so that a caller decides what touches the disk.
pub fn parse_catalog(
    path: &Path,
    text: &str,
    read: &mut dyn FnMut(&Path) -> std::io::Result<String>,
) -> Result<Catalog, CatalogErrors> {
    let mut faults = Faults::new(path, text);
    let (document, syntax) = DeTable::parse_recoverable(text);
    for error in &syntax {
        let line = faults.line_of(error.span().map_or(0, |span| span.start));
        let first = error.message().lines().next().unwrap_or("bad syntax");
        faults.at(line, format!("not TOML: {first}"), "correct the syntax");
    }
    if !syntax.is_empty() {
        // What a broken file seems to lack is not worth reporting.
        return Err(faults.into_errors());
    }
    let mut root = Section::new("the catalog", 1, document.get_ref());
    let catalog = read_root(&mut root, path, &mut faults, read);
    root.finish(&mut faults);
    if faults.is_empty() {
        Ok(catalog)
    } else {
        Err(faults.into_errors())
    }
}

fn read_root(
    root: &mut Section,
    path: &Path,
    faults: &mut Faults,
    read: &mut dyn FnMut(&Path) -> std::io::Result<String>,
) -> Catalog {
    let default_generation = root
        .number(faults, "generation", 0..=MAX_GENERATION)
        .map_or(0, |found| found.value);
    let (nodes, node_index) = read_nodes(root, faults);
    let (tenants, tenant_index) = read_tenants(root, path, faults, read);
    let mut declared = Vec::new();
    let mut names = HashMap::new();
    for (kind, key, title) in [
        (ShardKind::Stream, "stream", "[[stream]]"),
        (ShardKind::Cache, "cache", "[[cache]]"),
    ] {
        for section in root.tables(faults, key, title) {
            let Some(spec) = read_sharded(section, kind, faults) else {
                continue;
            };
            if !tenant_index.contains_key(&spec.tenant) {
                let cause = format!("{} names tenant {:?}", spec.title(), spec.tenant.as_str());
                faults.at(spec.line, cause, "add a [[tenant]] with that id");
            }
            if usize::from(spec.replicas) > nodes.len() && !nodes.is_empty() {
                let cause = format!("{} has {} replicas", spec.title(), spec.replicas);
                let remedy = format!("use at most {}, the number of nodes", nodes.len());
                faults.at(spec.line, cause, remedy);
            }
            if let Some(first) = names.insert(spec.full_name(), declared.len()) {
                let line = declared.get(first).map_or(0, |other: &Declared| other.line);
                let cause = format!("{} is declared again", spec.title());
                faults.at(
                    spec.line,
                    cause,
                    format!("remove it or the one on line {line}"),
                );
            }
            declared.push(spec);
        }
    }
    let total: u64 = declared.iter().map(|spec| u64::from(spec.shards)).sum();
    let by_hand = read_assignments(root, faults, &declared, &names, &node_index);
    let sharded = if total > MAX_SHARDS_IN_ALL {
        faults.whole(
            format!("the catalog has {total} shards"),
            format!("use at most {MAX_SHARDS_IN_ALL}"),
        );
        Vec::new()
    } else if faults.is_empty() {
        place(declared, &nodes, by_hand, default_generation)
    } else {
        Vec::new()
    };
    Catalog {
        generation: Generation(default_generation),
        source: path.to_path_buf(),
        nodes,
        node_index,
        tenants,
        tenant_index,
        sharded,
    }
}

fn address(faults: &mut Faults, text: Option<Located<&str>>) -> Option<Located<HostPort>> {
    let text = text?;
    match HostPort::parse(text.value) {
        Ok(value) => Some(Located {
            value,
            line: text.line,
        }),
        Err(why) => {
            faults.at(
                text.line,
                format!("address {:?} {why}", text.value),
                "write host:port as others dial it, for example \"10.0.0.1:5000\"",
            );
            None
        }
    }
}

fn read_nodes(
    root: &mut Section,
    faults: &mut Faults,
) -> (Vec<NodeInfo>, HashMap<NodeId, NodeIdx>) {
    let mut nodes: Vec<NodeInfo> = Vec::new();
    let mut index = HashMap::new();
    let mut addresses: HashMap<HostPort, u32> = HashMap::new();
    let sections = root.tables(faults, "node", "[[node]]");
    if sections.is_empty() {
        faults.whole("there is no [[node]]", "add one for every broker");
    }
    if sections.len() > MAX_NODES {
        let cause = format!("there are {} nodes", sections.len());
        faults.whole(cause, format!("use at most {MAX_NODES}"));
        return (nodes, index);
    }
    for mut section in sections {
        let text = section.required_text(faults, "id", "\"broker-1\"");
        let id = named(faults, text, node_id);
        let text = section.required_text(faults, "client", "\"10.0.0.1:5000\"");
        let client = address(faults, text);
        let text = section.required_text(faults, "internal", "\"10.0.0.1:5001\"");
        let internal = address(faults, text);
        let line = section.line;
        section.finish(faults);
        for found in [&client, &internal].into_iter().flatten() {
            if let Some(first) = addresses.insert(found.value.clone(), found.line) {
                let cause = format!("address {} is used twice", found.value);
                let remedy = format!("give each listener its own; the other is on line {first}");
                faults.at(found.line, cause, remedy);
            }
        }
        let (Some(node_id), Some(client), Some(internal)) = (id, client, internal) else {
            continue;
        };
        if index.contains_key(&node_id) {
            let cause = format!("node {:?} is declared again", node_id.as_str());
            faults.at(line, cause, "give every node its own id");
            continue;
        }
        index.insert(node_id.clone(), NodeIdx(nodes.len() as u16));
        nodes.push(NodeInfo {
            node_id,
            client_addr: Arc::from(client.value.to_string()),
            internal_addr: internal.value,
        });
    }
    (nodes, index)
}

/// A certificate verifier reads a name of four numbers as an address, never as a DNS name.
fn node_id(text: &str) -> Result<NodeId, NameError> {
    if text.parse::<std::net::IpAddr>().is_ok() {
        return Err(NameError::NotDns {
            value: text.to_string(),
        });
    }
    NodeId::new(text)
}

fn read_tenants(
    root: &mut Section,
    path: &Path,
    faults: &mut Faults,
    read: &mut dyn FnMut(&Path) -> std::io::Result<String>,
) -> (Vec<Tenant>, HashMap<TenantId, usize>) {
    let mut tenants: Vec<Tenant> = Vec::new();
    let mut index = HashMap::new();
    for mut section in root.tables(faults, "tenant", "[[tenant]]") {
        let text = section.required_text(faults, "id", "\"t1\"");
        let id = plain(faults, text, TenantId::new);
        let line = section.line;
        let keys = read_keys(&mut section, path, faults, read);
        section.finish(faults);
        let Some(id) = id else { continue };
        if index.contains_key(&id) {
            let cause = format!("tenant {:?} is declared again", id.as_str());
            faults.at(line, cause, "keep one of them, with all keys");
            continue;
        }
        index.insert(id.clone(), tenants.len());
        tenants.push(Tenant { id, keys });
    }
    (tenants, index)
}

fn read_keys(
    tenant: &mut Section,
    path: &Path,
    faults: &mut Faults,
    read: &mut dyn FnMut(&Path) -> std::io::Result<String>,
) -> Vec<TenantKey> {
    let faults_before = faults.is_empty();
    let mut keys: Vec<(TenantKey, u32)> = Vec::new();
    for mut section in tenant.tables(faults, "key", "[[tenant.key]]") {
        let kid = section.required_text(faults, "kid", "\"k1\"");
        let x = section.required_text(faults, "x", "\"<base64url, 32 bytes>\"");
        let line = section.line;
        section.finish(faults);
        let (Some(kid), Some(x)) = (kid, x) else {
            continue;
        };
        match decode_x(x.value) {
            Some(bytes) => {
                let kid = kid.value.to_string();
                keys.push((TenantKey { kid, x: bytes }, line));
            }
            None => faults.at(
                x.line,
                "x is not a public key",
                "write the 32 bytes of the Ed25519 public key in base64url without padding",
            ),
        }
    }
    if let Some(file) = tenant.text(faults, "jwks_file") {
        let full = path.parent().unwrap_or(Path::new("")).join(file.value);
        let parsed = read(&full)
            .map_err(|error| format!("cannot be read: {error}"))
            .and_then(|json| parse_jwks(&json).map_err(|error| error.to_string()));
        match parsed {
            Ok(list) => keys.extend(list.into_iter().map(|key| (key, file.line))),
            Err(why) => faults.at(
                file.line,
                format!("jwks_file {} {why}", full.display()),
                "name a readable file with at least one Ed25519 key",
            ),
        }
    }
    if keys.is_empty() && faults_before == faults.is_empty() {
        faults.at(
            tenant.line,
            "[[tenant]] has no key, so no token of it can ever verify",
            "add [[tenant.key]] or jwks_file",
        );
    }
    if keys.len() > MAX_KEYS_PER_TENANT {
        let cause = format!("[[tenant]] has {} keys", keys.len());
        faults.at(
            tenant.line,
            cause,
            format!("use at most {MAX_KEYS_PER_TENANT}"),
        );
    }
    for (at, (key, line)) in keys.iter().enumerate() {
        if keys[..at].iter().any(|(other, _)| other.kid == key.kid) {
            let cause = format!("key id {:?} is used twice", key.kid);
            faults.at(*line, cause, "give every key its own kid");
        }
    }
    keys.into_iter().map(|(key, _)| key).collect()
}
