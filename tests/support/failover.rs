//! What an operator does about a leader that is gone: looks at the copies, chooses, writes the
//! catalog.

use std::time::{Duration, Instant};

use felix_uring::cluster::{NAMESPACE, TENANT};

use super::brokers::Brokers;

/// Long enough for a restarted broker on a busy machine.
pub const LATER: Duration = Duration::from_secs(60);

/// One shard of three copies, as the catalog and `/status` name it.
#[derive(Debug, Clone, Copy)]
pub struct CopiedShard {
    /// `stream` or `cache`, which is also the name of its main log.
    pub kind: &'static str,
    pub name: &'static str,
}

impl CopiedShard {
    /// How far a node's copy of one of the logs is on its disk; `None` when it knows of none.
    pub fn reach(self, brokers: &Brokers, node: usize, log: &str) -> Option<u64> {
        let status = brokers.cluster.node(node).status().ok()?;
        let copy = format!("{}:{TENANT}/{NAMESPACE}/{}#0/{log}", self.kind, self.name);
        let shards = status["cores"][0]["shards"].as_array()?;
        let found = shards.iter().find(|shard| shard["shard"] == copy)?;
        found["durable_offset"].as_u64()
    }

    /// Waits until a node's copy of a log holds `least` records.
    pub async fn wait_reach(self, brokers: &Brokers, node: usize, log: &str, least: u64) {
        let deadline = Instant::now() + LATER;
        loop {
            let reach = self.reach(brokers, node, log);
            if reach >= Some(least) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{self:?}/{log} of node {node} reaches {reach:?}, not {least}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until a leader knows that every copy of what it leads is level with its own.
    pub async fn wait_level(self, brokers: &Brokers, leader: usize) {
        let deadline = Instant::now() + LATER;
        loop {
            let status = brokers.cluster.node(leader).status();
            let status = status.unwrap_or_else(|e| panic!("{e}"));
            let replication = &status["cores"][0]["replication"];
            let is_level =
                replication["lag_records"] == 0 && replication["halted"] == serde_json::json!([]);
            if is_level {
                return;
            }
            assert!(Instant::now() < deadline, "not level: {replication}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Writes another leader and generation into the catalog.
    pub fn assign(self, brokers: &Brokers, leader: usize, generation: u64) {
        brokers.edit_catalog(|catalog| {
            let assignments = catalog["assignment"].as_array_mut().expect("assignments");
            let found = assignments
                .iter_mut()
                .filter_map(toml::Value::as_table_mut)
                .find(|table| {
                    let is = |field: &str, value| {
                        table.get(field).and_then(|v| v.as_str()) == Some(value)
                    };
                    is("name", self.name) && is("kind", self.kind)
                })
                .expect("the shard");
            found.insert("leader".into(), format!("node-{}", leader + 1).into());
            found.insert("generation".into(), (generation as i64).into());
        });
    }

    /// The leader is down: the other member whose copy reaches furthest leads, and is open when this
    /// returns. Every majority of three holds one of the two looked at.
    pub async fn replace(self, brokers: &Brokers, gone: usize, generation: u64) -> usize {
        let others: Vec<usize> = (0..3).filter(|node| *node != gone).collect();
        let deadline = Instant::now() + LATER;
        let furthest = loop {
            let reaches: Vec<Option<u64>> = others
                .iter()
                .map(|node| self.reach(brokers, *node, self.kind))
                .collect();
            if let [Some(first), Some(second)] = reaches[..] {
                break others[usize::from(second > first)];
            }
            assert!(Instant::now() < deadline, "{self:?}: {reaches:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        self.assign(brokers, furthest, generation);
        brokers.wait_metric_for(furthest, "felix_replicated_shards_open", 1.0, LATER);
        furthest
    }
}
