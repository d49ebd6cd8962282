//! The cluster a run publishes to: one of its own, or one that runs already.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{anyhow, Result};
use bytes::Bytes;
use felix_uring::cluster::{
    BrokerProgram, Cluster, ClusterSpec, NodeExit, ShardedSpec, NAMESPACE, TENANT,
};
use felix_uring::wire::routing::{shard_for_key, Routing};

use super::args::{Ack, ForwardArgs};
use crate::client::{
    ask_owners, ask_width, trust, FelixNames, LoadError, LoadSpec, Protocol, ReadPlan, Target,
};
use crate::cpu::{CpuPlan, CpuShare};
use crate::schedule::Pace;

/// The stream of a cluster of our own.
const OWN_STREAM: &str = "bench";
/// Longer than any run.
const TOKEN_TTL: Duration = Duration::from_secs(7 * 24 * 3600);

/// Where to publish, and as whom.
pub struct Destination {
    /// Of a cluster of our own.
    pub own: Option<Cluster>,
    /// Trust.
    pub tls: Arc<rustls::ClientConfig>,
    /// The name in the certificates.
    pub server_name: String,
    /// Tenant, stream and token.
    pub names: FelixNames,
    /// Whom to connect to, and with which shards.
    pub targets: Vec<Target>,
    /// Shards of the stream.
    pub shards: u32,
    /// By shard, a key that leads to it.
    pub keys: Vec<Option<Bytes>>,
    /// By shard, the broker that owns it, counted from 0; only of a cluster of our own.
    pub owner_of: Vec<usize>,
    /// Brokers' names and admin addresses.
    pub admins: Vec<(String, SocketAddr)>,
}

/// Brokers that are this program again, on the CPUs of the plan, and which of them own shards: all but
/// the first, which forwards.
pub fn spec_of_own(
    dir: &Path,
    plan: &CpuPlan,
    brokers: usize,
) -> Result<(ClusterSpec, Vec<usize>)> {
    let owners = match brokers {
        1 => vec![0],
        n => (1..n).collect(),
    };
    let program = BrokerProgram {
        path: std::env::current_exe()?,
        args: vec!["broker".into()],
    };
    let mut spec = ClusterSpec::new(dir.join("cluster"), brokers, program);
    spec.cpus = plan.brokers.clone();
    Ok((spec, owners))
}

impl Destination {
    /// Starts brokers: the shards live on all but the first, which forwards.
    pub fn start(args: &ForwardArgs, dir: &Path, plan: &CpuPlan) -> Result<Self> {
        let brokers = usize::from(args.brokers);
        let (mut spec, owners) = spec_of_own(dir, plan, brokers)?;
        spec.cores_per_node = usize::from(args.cores_per_broker);
        spec.queue_depth = Some(args.queue_depth);
        spec.extra_args = args.serve.serve_flags.clone();
        let mut stream = ShardedSpec::new(OWN_STREAM, args.shards).led_by(&owners);
        stream.replicas = args.replicas;
        stream.consistency = Some(match args.ack {
            Ack::Leader => "leader".to_string(),
            Ack::Quorum => "quorum".to_string(),
        });
        spec.streams = vec![stream];
        let cluster = Cluster::start(&spec)?;
        let owner_of: Vec<usize> = (0..args.shards as usize)
            .map(|shard| owners[shard % owners.len()])
            .collect();
        let targets = match args.direct {
            false => vec![Target {
                addr: cluster.node(0).client_addr(),
                shards: (0..args.shards).collect(),
            }],
            true => direct_targets(&owners, &owner_of, |owner| {
                cluster.node(owner).client_addr()
            }),
        };
        let admins = cluster
            .nodes()
            .iter()
            .map(|node| (node.node_id().to_string(), node.admin_addr()))
            .collect();
        Ok(Self {
            tls: trust(cluster.ca())?,
            server_name: "localhost".into(),
            names: FelixNames {
                tenant: TENANT.into(),
                namespace: NAMESPACE.into(),
                stream: OWN_STREAM.into(),
                token: cluster.token(TOKEN_TTL)?,
            },
            targets,
            shards: args.shards,
            keys: keys_for(args.shards, Routing::Modulo),
            owner_of,
            admins,
            own: Some(cluster),
        })
    }

    /// Looks at a running cluster: the width of the stream, and with `--direct` its owners.
    pub fn find(args: &ForwardArgs) -> Result<Self, LoadError> {
        let (Some(addr), Some(ca), Some(token)) = (args.addr, &args.ca, &args.token) else {
            return Err(LoadError::Setup("--addr needs --ca and --token".into()));
        };
        let tls = trust(ca).map_err(|error| LoadError::Setup(format!("{error:#}")))?;
        let names = FelixNames {
            tenant: args.tenant.clone(),
            namespace: args.namespace.clone(),
            stream: args.stream.clone(),
            token: token.clone(),
        };
        let plan = ReadPlan {
            addr,
            server_name: args.server_name.clone(),
            tls: tls.clone(),
            names: names.clone(),
        };
        let width = ask_width(&plan)?;
        let all: Vec<u32> = (0..width.shards).collect();
        let targets = match args.direct {
            false => vec![Target { addr, shards: all }],
            true => {
                let owners = ask_owners(&plan)?;
                let mut targets: Vec<Target> = Vec::new();
                for (shard, owner) in all.into_iter().zip(owners) {
                    let addr = owner.ok_or_else(|| {
                        LoadError::Refused(format!("shard {shard} has no owner with an address"))
                    })?;
                    match targets.iter_mut().find(|t| t.addr == addr) {
                        Some(target) => target.shards.push(shard),
                        None => targets.push(Target {
                            addr,
                            shards: vec![shard],
                        }),
                    }
                }
                targets
            }
        };
        let admins = args
            .admin
            .iter()
            .map(|addr| (addr.to_string(), *addr))
            .collect();
        Ok(Self {
            own: None,
            tls,
            server_name: args.server_name.clone(),
            names,
            targets,
            shards: width.shards,
            keys: keys_for(width.shards, width.routing),
            owner_of: Vec::new(),
            admins,
        })
    }

    /// A load of batches that are published as answers come, from the load generator's CPU; shape and length
    /// are the caller's.
    pub fn load_spec(&self, run: u64, plan: &CpuPlan) -> LoadSpec {
        LoadSpec {
            run,
            protocol: Protocol::Felix(self.names.clone()),
            targets: self.targets.clone(),
            server_name: self.server_name.clone(),
            tls: self.tls.clone(),
            connections: 1,
            streams: 1,
            in_flight: 1,
            batch: 1,
            payload_bytes: 0,
            shard_count: self.shards,
            keys: self.keys.clone(),
            pace: Pace::Closed,
            warmup: Duration::ZERO,
            duration: Duration::ZERO,
            request_timeout: Duration::from_secs(30),
            sockets: 1,
            cpu: Some(plan.client),
            share: CpuShare::Usual,
            first_writer: 0,
        }
    }

    /// How records are read back over the network.
    pub fn read_plan(&self) -> ReadPlan {
        ReadPlan {
            addr: self.targets[0].addr,
            server_name: self.server_name.clone(),
            tls: self.tls.clone(),
            names: self.names.clone(),
        }
    }

    /// An error with its last words when a broker of ours has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        for node in self.own.iter_mut().flat_map(|own| own.nodes_mut()) {
            node.check_alive()?;
        }
        Ok(())
    }

    /// As [`Self::check_alive`], of the broker that is published to alone: others may be stopped on purpose.
    pub fn check_leader(&mut self) -> Result<()> {
        let leader = self.owner_of.first().copied();
        if let (Some(own), Some(leader)) = (&mut self.own, leader) {
            own.node_mut(leader).check_alive()?;
        }
        Ok(())
    }

    /// Stops the brokers in order; says which did not end well.
    pub fn stop(&mut self) -> Result<()> {
        let Some(own) = &mut self.own else {
            return Ok(());
        };
        let exits = own.stop()?;
        let unclean: Vec<String> = exits
            .iter()
            .filter(|exit| !exit.is_clean())
            .map(NodeExit::to_string)
            .collect();
        match unclean.is_empty() {
            true => Ok(()),
            false => Err(anyhow!(
                "not every broker stopped in order: {}",
                unclean.join("; ")
            )),
        }
    }

    /// The data directory of the broker that owns a shard.
    pub fn data_dir_of(&self, shard: u32) -> Option<PathBuf> {
        let owner = *self.owner_of.get(shard as usize)?;
        let own = self.own.as_ref()?;
        Some(own.node(owner).data_dir().to_path_buf())
    }

    /// What a broker does on the path of a publish.
    pub fn role_of(&self, broker: usize, direct: bool) -> &'static str {
        let owns = self.owner_of.contains(&broker);
        match (owns, broker == 0 && !direct) {
            (true, true) => "both",
            (true, false) => "owner",
            (false, true) => "ingress",
            (false, false) => "idle",
        }
    }
}

fn direct_targets(
    owners: &[usize],
    owner_of: &[usize],
    addr_of: impl Fn(usize) -> SocketAddr,
) -> Vec<Target> {
    let shards_of = |owner: usize| -> Vec<u32> {
        (0..)
            .zip(owner_of)
            .filter(|(_, of)| **of == owner)
            .map(|(shard, _)| shard)
            .collect()
    };
    owners
        .iter()
        .map(|&owner| Target {
            addr: addr_of(owner),
            shards: shards_of(owner),
        })
        .filter(|target| !target.shards.is_empty())
        .collect()
}

/// By shard, the first key that leads to it. A stream of one shard needs none.
pub fn keys_for(shards: u32, routing: Routing) -> Vec<Option<Bytes>> {
    if shards <= 1 {
        return vec![None; shards as usize];
    }
    let mut keys: Vec<Option<Bytes>> = vec![None; shards as usize];
    let mut missing = keys.len();
    for n in 0u64.. {
        if missing == 0 {
            break;
        }
        let key = format!("key-{n}");
        let slot = &mut keys[shard_for_key(Some(key.as_bytes()), shards, routing) as usize];
        if slot.is_none() {
            *slot = Some(key.into());
            missing -= 1;
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shard_has_a_key_that_leads_to_it() {
        for routing in [Routing::Modulo, Routing::JumpHash] {
            for shards in [2, 8, 300] {
                let keys = keys_for(shards, routing);
                assert_eq!(keys.len(), shards as usize);
                for (shard, key) in (0..).zip(&keys) {
                    assert_eq!(shard_for_key(key.as_deref(), shards, routing), shard);
                    assert!(key.is_some());
                }
            }
        }
        assert_eq!(keys_for(1, Routing::Modulo), [None]);
    }

    #[test]
    fn direct_targets_cover_every_shard_once() {
        let owners = [1, 2, 3];
        let owner_of = [1, 2, 3, 1];
        let port = |owner: usize| SocketAddr::from(([127, 0, 0, 1], owner as u16));
        let targets = direct_targets(&owners, &owner_of, port);
        assert_eq!(targets.len(), 3);
        assert_eq!(targets[0].shards, [0, 3]);
        assert_eq!(targets[2].addr.port(), 3);
        assert_eq!(direct_targets(&owners, &[1], port).len(), 1);
    }
}
