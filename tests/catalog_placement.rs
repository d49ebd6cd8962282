//! Placement and lookups: even, stable, fast, and the same on every broker.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use felix_uring::catalog::{core_of, parse_catalog, rank_nodes, Catalog, NodeIdx, RouteTable};
use felix_uring::ids::{Namespace, NodeId, ShardId, ShardKind, StreamName, TenantId};

fn shard(shard: u32) -> ShardId {
    ShardId {
        kind: ShardKind::Stream,
        tenant: TenantId::new("t1").expect("a name"),
        namespace: Namespace::new("ns").expect("a name"),
        name: StreamName::new("orders").expect("a name"),
        shard,
    }
}

fn nodes(count: usize) -> Vec<NodeId> {
    let ids = (0..count).map(|n| NodeId::new(&format!("broker-{n}")));
    ids.collect::<Result<_, _>>().expect("names")
}

const SHARDS: u32 = 12_000;

#[test]
fn leaders_and_followers_are_spread_evenly() {
    let nodes = nodes(6);
    let mut leads = [0u32; 6];
    let mut holds = [0u32; 6];
    for n in 0..SHARDS {
        let ranked = rank_nodes(&shard(n), &nodes, 3);
        assert_eq!(ranked.len(), 3);
        leads[usize::from(ranked[0].0)] += 1;
        for node in &ranked {
            holds[usize::from(node.0)] += 1;
        }
    }
    // 2,000 leads each; four standard deviations are 163.
    assert!(
        leads.iter().all(|n| (1_837..=2_163).contains(n)),
        "{leads:?}"
    );
    assert!(
        holds.iter().all(|n| (5_780..=6_220).contains(n)),
        "{holds:?}"
    );
}

#[test]
fn a_new_node_takes_its_share_and_moves_nothing_else() {
    let (before, after) = (nodes(5), nodes(6));
    let mut moved = 0;
    for n in 0..SHARDS {
        let old = rank_nodes(&shard(n), &before, 1)[0];
        let new = rank_nodes(&shard(n), &after, 1)[0];
        if old != new {
            assert_eq!(new, NodeIdx(5), "a shard moved between old nodes");
            moved += 1;
        }
    }
    // One sixth of 12,000 is 2,000.
    assert!((1_837..=2_163).contains(&moved), "{moved}");
}

#[test]
fn the_order_of_the_nodes_in_the_file_does_not_matter() {
    let forward = nodes(7);
    let mut backward = forward.clone();
    backward.reverse();
    for n in 0..500 {
        let names = |ids: &[NodeId]| -> Vec<String> {
            let ranked = rank_nodes(&shard(n), ids, 3);
            ranked
                .iter()
                .map(|i| ids[usize::from(i.0)].to_string())
                .collect()
        };
        assert_eq!(names(&forward), names(&backward));
    }
}

/// The placement is part of the cluster's agreement: brokers of different releases must agree.
#[test]
fn placement_does_not_change_between_releases() {
    let nodes = nodes(5);
    let leaders: Vec<u16> = (0..12)
        .map(|n| rank_nodes(&shard(n), &nodes, 1)[0].0)
        .collect();
    assert_eq!(leaders, GOLDEN_LEADERS);
    let cores: Vec<u16> = (0..12).map(|n| core_of(&shard(n), 4).0).collect();
    assert_eq!(cores, GOLDEN_CORES);
}

const GOLDEN_LEADERS: [u16; 12] = [0, 4, 2, 4, 0, 3, 0, 4, 2, 4, 0, 2];
const GOLDEN_CORES: [u16; 12] = [0, 0, 2, 0, 0, 2, 2, 3, 3, 3, 0, 0];

#[test]
fn cores_are_even_also_among_the_shards_of_one_node() {
    let nodes = nodes(3);
    let mut per_core = [0u32; 4];
    for n in 0..SHARDS {
        if rank_nodes(&shard(n), &nodes, 1)[0] == NodeIdx(0) {
            per_core[usize::from(core_of(&shard(n), 4).0)] += 1;
        }
    }
    // 1,000 each; four standard deviations are about 120.
    assert!(
        per_core.iter().all(|n| (870..=1_130).contains(n)),
        "{per_core:?}"
    );
    assert_eq!(core_of(&shard(0), 0), core_of(&shard(0), 1));
}

fn big_catalog(streams: u32, shards: u32) -> Arc<Catalog> {
    let mut text = String::new();
    for n in 0..3 {
        text += &format!(
            "[[node]]\nid = \"broker-{n}\"\nclient = \"127.0.0.1:{}\"\ninternal = \"127.0.0.1:{}\"\n",
            5000 + n,
            6000 + n
        );
    }
    text += "[[tenant]]\nid = \"t1\"\n[[tenant.key]]\nkid = \"k\"\nx = \"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo\"\n";
    for n in 0..streams {
        text += &format!(
            "[[stream]]\ntenant = \"t1\"\nnamespace = \"ns\"\nname = \"s{n}\"\nshards = {shards}\nreplicas = 2\n\
             [[cache]]\ntenant = \"t1\"\nnamespace = \"ns\"\nname = \"s{n}\"\n"
        );
    }
    let parsed = parse_catalog(Path::new("c.toml"), &text, &mut |_| unreachable!());
    Arc::new(parsed.expect("valid"))
}

#[test]
fn a_table_finds_everything_and_nothing_else() {
    let catalog = big_catalog(50, 8);
    let me = NodeId::new("broker-1").expect("a name");
    let table = RouteTable::build(&catalog, &me, 4);
    let route = table.stream("t1", "ns", "s7").expect("declared");
    assert_eq!(route.shards.len(), 8);
    assert_eq!(
        table
            .cache("t1", "ns", "s7")
            .expect("declared")
            .shards
            .len(),
        1
    );
    for (tenant, namespace, name) in [
        ("t1", "ns", "s50"),
        ("t1n", "s", "s7"),
        ("", "", ""),
        ("t2", "ns", "s7"),
    ] {
        assert!(table.stream(tenant, namespace, name).is_none());
    }
    assert!(table.tenant_exists("t1") && !table.tenant_exists("t2"));
    let my_index = table.me().expect("a node");
    assert_eq!(table.node(my_index).node_id, me);
    assert_eq!(table.node_by_id("broker-1"), Some(my_index));
    assert_eq!(table.shards().count(), 50 * 9);
    for entry in table.shards() {
        assert_eq!(entry.is_local, entry.leader == my_index);
        assert_eq!(
            entry.is_follower,
            !entry.is_local && entry.replicas.contains(&my_index)
        );
        assert_eq!(entry.core, core_of(&entry.shard_id, 4));
        let found = table
            .shard(&entry.shard_id)
            .expect("found by its full name");
        assert!(Arc::ptr_eq(&found.shard_id, &entry.shard_id));
    }
    assert!(table.shard(&shard(0)).is_none());
    let stranger = NodeId::new("broker-9").expect("a name");
    let table = RouteTable::build(&catalog, &stranger, 4);
    assert!(table.me().is_none() && !table.shards().any(|s| s.is_local || s.is_follower));
}

#[test]
fn ten_thousand_shards_build_quickly_and_are_found_quickly() {
    let started = Instant::now();
    let catalog = big_catalog(1_250, 7);
    let parsed = started.elapsed();
    let me = NodeId::new("broker-1").expect("a name");
    let started = Instant::now();
    let table = RouteTable::build(&catalog, &me, 4);
    let built = started.elapsed();
    assert_eq!(table.shards().count(), 10_000);
    let names: Vec<String> = (0..1_250).map(|n| format!("s{n}")).collect();
    let started = Instant::now();
    for _ in 0..80 {
        for name in &names {
            assert!(table.stream("t1", "ns", name).is_some());
        }
    }
    let lookup = started.elapsed() / 100_000;
    println!("10,000 shards: parse {parsed:?}, build {built:?}, lookup {lookup:?}");
    assert!(parsed < Duration::from_secs(2) && built < Duration::from_secs(1));
    assert!(lookup < Duration::from_micros(5), "{lookup:?}");
}
