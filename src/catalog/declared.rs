//! `[[stream]]` and `[[cache]]`: what they declare, before any shard has a place.

use std::time::Duration;

use crate::ids::{Namespace, ShardKind, StreamName, TenantId};
use crate::limits::{MAX_RETENTION_AGE_S, MAX_RETENTION_BYTES};
use crate::wire::routing::Routing;

use super::fault::Faults;
use super::model::{Consistency, StreamRetention};
use super::names::plain;
use super::section::{Located, Section};

/// Most shards of one stream or cache.
pub(super) const MAX_SHARDS: u64 = 16_384;
/// Most nodes that hold one shard.
const MAX_REPLICAS: u64 = 9;
/// TOML's own largest whole number.
pub(super) const MAX_GENERATION: u64 = i64::MAX as u64;

/// A stream or cache before its shards are placed.
pub(super) struct Declared {
    pub kind: ShardKind,
    pub tenant: TenantId,
    pub namespace: Namespace,
    pub name: StreamName,
    pub shards: u32,
    pub routing: Routing,
    pub replicas: u16,
    pub consistency: Consistency,
    pub retention: StreamRetention,
    pub generation: Option<u64>,
    pub line: u32,
}

pub(super) type FullName = (ShardKind, TenantId, Namespace, StreamName);

impl Declared {
    pub(super) fn full_name(&self) -> FullName {
        let (tenant, namespace) = (self.tenant.clone(), self.namespace.clone());
        (self.kind, tenant, namespace, self.name.clone())
    }

    pub(super) fn title(&self) -> String {
        title(&self.full_name())
    }
}

pub(super) fn title((kind, tenant, namespace, name): &FullName) -> String {
    let kind = match kind {
        ShardKind::Stream => "stream",
        ShardKind::Cache => "cache",
    };
    format!("{kind} {tenant}/{namespace}/{name}")
}

pub(super) fn choice<T: Copy>(
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

pub(super) fn read_sharded(
    mut section: Section,
    kind: ShardKind,
    faults: &mut Faults,
) -> Option<Declared> {
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
    let mut retention = StreamRetention::default();
    if kind == ShardKind::Stream {
        let text = section.text(faults, "routing");
        let maps = [
            ("modulo", Routing::Modulo),
            ("jump_hash", Routing::JumpHash),
        ];
        routing = choice(faults, "routing", text, &maps);
        retention = read_retention(&mut section, faults);
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
        retention,
        generation: generation.map(|found| found.value),
        line,
    })
}

fn read_retention(section: &mut Section, faults: &mut Faults) -> StreamRetention {
    let bytes = section.number(faults, "retention_bytes", 0..=MAX_RETENTION_BYTES);
    let text = section.text(faults, "retention_age");
    StreamRetention {
        bytes: bytes.map(|found| found.value),
        age: text.and_then(|text| read_age(text, faults)),
    }
}

/// A length of time with its unit: `90s`, `30m`, `12h`, `7d`.
fn read_age(text: Located<&str>, faults: &mut Faults) -> Option<Duration> {
    let age = age_s(text.value).filter(|age_s| *age_s <= MAX_RETENTION_AGE_S);
    if age.is_none() {
        let days = MAX_RETENTION_AGE_S / 86_400;
        faults.at(
            text.line,
            format!("retention_age is {:?}", text.value),
            format!("use a whole number with its unit, s, m, h or d, up to {days}d: \"7d\"; \"0s\" keeps records for ever"),
        );
    }
    age.map(Duration::from_secs)
}

fn age_s(text: &str) -> Option<u64> {
    let unit = text.chars().last()?;
    let unit_s = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return None,
    };
    let digits = text.strip_suffix(unit)?;
    let is_plain = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    let number: u64 = is_plain.then(|| digits.parse().ok())??;
    number.checked_mul(unit_s)
}
