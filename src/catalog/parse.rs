//! From the text of a catalog file to a [`Catalog`], with every mistake named.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use toml::de::DeTable;

use crate::ids::{Generation, NameError, Namespace, NodeId, ShardKind, StreamName, TenantId};
use crate::wire::routing::Routing;

use super::fault::{CatalogErrors, Faults};
use super::jwks::{decode_x, parse_jwks};
use super::model::{
    Assignment, Catalog, Consistency, HostPort, NodeIdx, NodeInfo, ShardedSpec, Tenant, TenantKey,
};
use super::placement::{node_hash, rank, shard_hash};
use super::section::{Located, Section};

/// Most nodes of one cluster.
const MAX_NODES: usize = 1024;
/// Most keys of one tenant: each may cost one signature check when a token names none of them.
const MAX_KEYS_PER_TENANT: usize = 16;
/// Most shards of one stream or cache.
const MAX_SHARDS: u64 = 16_384;
/// Most nodes that hold one shard.
const MAX_REPLICAS: u64 = 9;
/// Most shards of the whole catalog.
const MAX_SHARDS_IN_ALL: u64 = 1_000_000;
/// TOML's own largest whole number.
const MAX_GENERATION: u64 = i64::MAX as u64;

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
        source: path.to_path_buf(),
        nodes,
        node_index,
        tenants,
        tenant_index,
        sharded,
    }
}

fn named<T>(
    faults: &mut Faults,
    text: Option<Located<&str>>,
    make: impl Fn(&str) -> Result<T, NameError>,
) -> Option<T> {
    let text = text?;
    match make(text.value) {
        Ok(name) => Some(name),
        Err(error) => {
            let full = error.to_string();
            let (cause, remedy) = match full.split_once(';').or_else(|| full.split_once(':')) {
                Some((cause, remedy)) => (cause.to_string(), remedy.trim().to_string()),
                None => (full, "use another name".to_string()),
            };
            faults.at(text.line, cause, remedy);
            None
        }
    }
}

/// Names that meet in a permission string must not contain what separates or matches there.
fn plain<T>(
    faults: &mut Faults,
    text: Option<Located<&str>>,
    make: impl Fn(&str) -> Result<T, NameError>,
) -> Option<T> {
    if let Some(found) = &text {
        let bad = |c: char| c == '/' || c == '*' || c.is_control();
        if found.value.contains(bad) {
            faults.at(
                found.line,
                format!(
                    "name {:?} contains '/', '*' or a control character",
                    found.value
                ),
                "remove it: permissions are written tenant/namespace/name with * as wildcard",
            );
            return None;
        }
    }
    named(faults, text, make)
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

/// A stream or cache before its shards are placed.
struct Declared {
    kind: ShardKind,
    tenant: TenantId,
    namespace: Namespace,
    name: StreamName,
    shards: u32,
    routing: Routing,
    replicas: u16,
    consistency: Consistency,
    generation: Option<u64>,
    line: u32,
}

type FullName = (ShardKind, TenantId, Namespace, StreamName);

impl Declared {
    fn full_name(&self) -> FullName {
        let (tenant, namespace) = (self.tenant.clone(), self.namespace.clone());
        (self.kind, tenant, namespace, self.name.clone())
    }

    fn title(&self) -> String {
        title(&self.full_name())
    }
}

fn title((kind, tenant, namespace, name): &FullName) -> String {
    let kind = match kind {
        ShardKind::Stream => "stream",
        ShardKind::Cache => "cache",
    };
    format!("{kind} {tenant}/{namespace}/{name}")
}

fn choice<T: Copy>(
    faults: &mut Faults,
    key: &str,
    text: Option<Located<&str>>,
    choices: &[(&str, T)],
) -> Option<T> {
    let text = text?;
    let found = choices.iter().find(|(name, _)| *name == text.value);
    if found.is_none() {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let cause = format!("{key} is {:?}", text.value);
        faults.at(text.line, cause, format!("use {}", names.join(" or ")));
    }
    found.map(|(_, value)| *value)
}

fn read_sharded(mut section: Section, kind: ShardKind, faults: &mut Faults) -> Option<Declared> {
    let line = section.line;
    let text = section.required_text(faults, "tenant", "\"t1\"");
    let tenant = plain(faults, text, TenantId::new);
    let text = section.required_text(faults, "namespace", "\"default\"");
    let namespace = plain(faults, text, Namespace::new);
    let text = section.required_text(faults, "name", "\"events\"");
    let name = plain(faults, text, StreamName::new);
    let shards = section.number(faults, "shards", 1..=MAX_SHARDS);
    let replicas = section.number(faults, "replicas", 1..=MAX_REPLICAS);
    let generation = section.number(faults, "generation", 0..=MAX_GENERATION);
    let text = section.text(faults, "consistency");
    let levels = [
        ("leader", Consistency::Leader),
        ("quorum", Consistency::Quorum),
    ];
    let consistency = choice(faults, "consistency", text, &levels);
    let mut routing = None;
    if kind == ShardKind::Stream {
        let text = section.text(faults, "routing");
        let maps = [
            ("modulo", Routing::Modulo),
            ("jump_hash", Routing::JumpHash),
        ];
        routing = choice(faults, "routing", text, &maps);
        let durable = section.flag(faults, "durable");
        if let Some(found) = durable.filter(|found| !found.value) {
            faults.at(
                found.line,
                "durable is false",
                "set it to true or remove it: every stream is on disk before it is acknowledged",
            );
        }
    }
    section.finish(faults);
    Some(Declared {
        kind,
        tenant: tenant?,
        namespace: namespace?,
        name: name?,
        shards: shards.map_or(1, |found| found.value as u32),
        routing: routing.unwrap_or(Routing::Modulo),
        replicas: replicas.map_or(1, |found| found.value as u16),
        consistency: consistency.unwrap_or(Consistency::Leader),
        generation: generation.map(|found| found.value),
        line,
    })
}

/// What an [[assignment]] fixes: the leader first, then followers if they were named.
struct ByHand {
    nodes: Vec<NodeIdx>,
    generation: Option<u64>,
    line: u32,
}

/// Assignments by place in the list of declared streams and caches, and shard.
type ByHandMap = HashMap<(usize, u32), ByHand>;

fn read_assignments(
    root: &mut Section,
    faults: &mut Faults,
    declared: &[Declared],
    names: &HashMap<FullName, usize>,
    nodes: &HashMap<NodeId, NodeIdx>,
) -> ByHandMap {
    let mut by_hand = ByHandMap::new();
    for mut section in root.tables(faults, "assignment", "[[assignment]]") {
        let line = section.line;
        let text = section.required_text(faults, "kind", "\"stream\"");
        let kinds = [("stream", ShardKind::Stream), ("cache", ShardKind::Cache)];
        let kind = choice(faults, "kind", text, &kinds);
        let text = section.required_text(faults, "tenant", "\"t1\"");
        let tenant = named(faults, text, TenantId::new);
        let text = section.required_text(faults, "namespace", "\"default\"");
        let namespace = named(faults, text, Namespace::new);
        let text = section.required_text(faults, "name", "\"events\"");
        let name = named(faults, text, StreamName::new);
        let shard = section.number(faults, "shard", 0..=MAX_SHARDS - 1);
        let generation = section.number(faults, "generation", 0..=MAX_GENERATION);
        let leader = section.required_text(faults, "leader", "\"broker-1\"");
        let replicas = section.text_list(faults, "replicas");
        section.finish(faults);
        let holders = read_holders(faults, leader, replicas.as_deref(), nodes);
        let (Some(kind), Some(tenant), Some(namespace), Some(name)) =
            (kind, tenant, namespace, name)
        else {
            continue;
        };
        let full_name = (kind, tenant, namespace, name);
        let Some(&at) = names.get(&full_name) else {
            let cause = format!("[[assignment]] names {}", title(&full_name));
            faults.at(line, cause, "declare it, or correct the names");
            continue;
        };
        let spec = &declared[at];
        let shard = shard.map_or(0, |found| found.value as u32);
        check_assignment(
            faults,
            line,
            spec,
            shard,
            holders.as_deref(),
            replicas.is_some(),
        );
        let Some(nodes) = holders else { continue };
        let entry = ByHand {
            nodes,
            generation: generation.map(|found| found.value),
            line,
        };
        if let Some(first) = by_hand.insert((at, shard), entry) {
            let cause = format!("shard {shard} of {} is assigned again", spec.title());
            let remedy = format!("remove it or the one on line {}", first.line);
            faults.at(line, cause, remedy);
        }
    }
    by_hand
}

fn check_assignment(
    faults: &mut Faults,
    line: u32,
    spec: &Declared,
    shard: u32,
    holders: Option<&[NodeIdx]>,
    replicas_named: bool,
) {
    if shard >= spec.shards {
        let cause = format!("{} has no shard {shard}", spec.title());
        let remedy = format!("use a shard from 0 to {}", spec.shards - 1);
        faults.at(line, cause, remedy);
    }
    let count = holders.map_or(0, <[NodeIdx]>::len);
    if replicas_named && holders.is_some() && count != usize::from(spec.replicas) {
        let want = spec.replicas;
        let cause = format!("{count} nodes hold shard {shard} of {}", spec.title());
        let remedy = format!("name {want} with the leader, or change its replicas = {want}");
        faults.at(line, cause, remedy);
    }
}

/// The nodes of an assignment, leader first. The leader may be listed among the replicas.
fn read_holders(
    faults: &mut Faults,
    leader: Option<Located<&str>>,
    replicas: Option<&[Located<&str>]>,
    nodes: &HashMap<NodeId, NodeIdx>,
) -> Option<Vec<NodeIdx>> {
    let mut find = |found: &Located<&str>| {
        let index = nodes.get(found.value).copied();
        if index.is_none() {
            let cause = format!("node {:?} is not declared", found.value);
            faults.at(
                found.line,
                cause,
                "add a [[node]] with that id, or correct it",
            );
        }
        index
    };
    let leader = find(&leader?)?;
    let mut holders = vec![leader];
    let mut twice = Vec::new();
    for found in replicas.unwrap_or_default() {
        let Some(index) = find(found) else { continue };
        if !holders.contains(&index) {
            holders.push(index);
        } else if index != leader {
            twice.push(found);
        }
    }
    for found in twice {
        let cause = format!("node {:?} is named twice", found.value);
        faults.at(found.line, cause, "name every replica once");
    }
    Some(holders)
}

fn place(
    declared: Vec<Declared>,
    nodes: &[NodeInfo],
    mut by_hand: ByHandMap,
    default_generation: u64,
) -> Vec<ShardedSpec> {
    let hashed: Vec<(u64, &NodeId)> = nodes
        .iter()
        .map(|node| (node_hash(&node.node_id), &node.node_id))
        .collect();
    let specs = declared.into_iter().enumerate();
    specs
        .map(|(at, spec)| {
            let names = [
                spec.tenant.as_str(),
                spec.namespace.as_str(),
                spec.name.as_str(),
            ];
            let count = usize::from(spec.replicas);
            let spec_generation = spec.generation.unwrap_or(default_generation);
            let assignments = (0..spec.shards)
                .map(|shard| {
                    let ranked = rank(shard_hash(spec.kind, names, shard), &hashed, nodes.len());
                    let fixed = by_hand.remove(&(at, shard));
                    let generation = fixed.as_ref().and_then(|hand| hand.generation);
                    let mut holders = fixed.map_or_else(Vec::new, |hand| hand.nodes);
                    for candidate in ranked {
                        if holders.len() >= count {
                            break;
                        }
                        if !holders.contains(&candidate) {
                            holders.push(candidate);
                        }
                    }
                    Assignment {
                        replicas: Arc::from(holders),
                        generation: Generation(generation.unwrap_or(spec_generation)),
                    }
                })
                .collect();
            ShardedSpec {
                kind: spec.kind,
                tenant: spec.tenant,
                namespace: spec.namespace,
                name: spec.name,
                routing: spec.routing,
                replicas: spec.replicas,
                consistency: spec.consistency,
                assignments,
                line: spec.line,
            }
        })
        .collect()
}
