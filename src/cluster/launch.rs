//! Starting and stopping the brokers of a [`ClusterPlan`] together.

use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{json, Value};

use super::error::ClusterError;
use super::node::{BrokerNode, NodeExit};
use super::process::ChildSpec;
use super::spec::{ClusterPlan, ClusterSpec, NodePlan, CACHE, KEY_ID, NAMESPACE, STREAM, TENANT};
use crate::auth::{mint, MintRequest};

/// A running cluster; stopped when dropped.
#[derive(Debug)]
pub struct Cluster {
    plan: ClusterPlan,
    nodes: Vec<BrokerNode>,
    stop_timeout: Duration,
}

impl Cluster {
    /// Writes the files, starts every broker and waits until all are ready.
    pub fn start(spec: &ClusterSpec) -> Result<Self, ClusterError> {
        let mut cluster = Self::prepare(spec)?;
        for node in &mut cluster.nodes {
            node.start()?;
        }
        let deadline = Instant::now() + spec.ready_timeout;
        for node in &mut cluster.nodes {
            node.wait_ready_until(deadline)?;
        }
        Ok(cluster)
    }

    /// Writes the files and starts nothing; each node can be started by itself.
    pub fn prepare(spec: &ClusterSpec) -> Result<Self, ClusterError> {
        let plan = ClusterPlan::write(spec)?;
        let nodes = plan
            .nodes
            .iter()
            .enumerate()
            .map(|(index, node)| {
                BrokerNode::new(node.clone(), child_spec(spec, &plan, index, node), spec)
            })
            .collect();
        Ok(Self {
            plan,
            nodes,
            stop_timeout: spec.stop_timeout,
        })
    }

    pub fn dir(&self) -> &Path {
        &self.plan.dir
    }

    /// The CA file clients trust.
    pub fn ca(&self) -> &Path {
        &self.plan.ca
    }

    /// The tenant's private key in PEM.
    pub fn signing_key(&self) -> &Path {
        &self.plan.signing_key_path
    }

    pub fn catalog(&self) -> &Path {
        &self.plan.catalog
    }

    pub fn nodes(&self) -> &[BrokerNode] {
        &self.nodes
    }

    pub fn nodes_mut(&mut self) -> &mut [BrokerNode] {
        &mut self.nodes
    }

    /// Node `index`, counted from 0. Panics when there is none, as an index does.
    pub fn node(&self, index: usize) -> &BrokerNode {
        &self.nodes[index]
    }

    /// Node `index`, counted from 0. Panics when there is none, as an index does.
    pub fn node_mut(&mut self, index: usize) -> &mut BrokerNode {
        &mut self.nodes[index]
    }

    /// A token that allows everything a client of the tenant may do with data.
    pub fn token(&self, ttl: Duration) -> Result<String, ClusterError> {
        // Reading a stream includes its groups, changing a group does not come with it.
        let perms = ["stream.publish", "stream.subscribe", "group.manage"]
            .map(|action| format!("{action}:stream:{TENANT}/*/*"))
            .into_iter()
            .chain(
                ["cache.read", "cache.write"].map(|action| format!("{action}:cache:{TENANT}/*/*")),
            )
            .collect();
        self.token_with(perms, ttl)
    }

    /// A token with these permissions.
    pub fn token_with(&self, perms: Vec<String>, ttl: Duration) -> Result<String, ClusterError> {
        let iat = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let request = MintRequest {
            tenant: TENANT.to_string(),
            sub: "local-cluster".to_string(),
            iat,
            exp: iat + ttl.as_secs(),
            nbf: None,
            kid: Some(KEY_ID.to_string()),
            perms,
        };
        Ok(mint(&request, &self.plan.signing_key)?)
    }

    /// The object `cluster up --json` prints.
    pub fn report(&self, token: &str) -> Value {
        let nodes: Vec<Value> = self
            .nodes
            .iter()
            .map(|node| {
                json!({
                    "node_id": node.node_id(),
                    "client": node.client_addr().to_string(),
                    "internal": node.internal_addr().to_string(),
                    "admin": node.admin_addr().to_string(),
                    "pid": node.pid(),
                })
            })
            .collect();
        json!({
            "dir": self.dir(),
            "ca": self.ca(),
            "token": token,
            "tenant": TENANT,
            "namespace": NAMESPACE,
            "stream": STREAM,
            "cache": CACHE,
            "signing_key": self.signing_key(),
            "key_id": KEY_ID,
            "nodes": nodes,
        })
    }

    /// Stops all brokers at once; those that do not stop in time are killed. Every one is
    /// stopped even if one cannot be; the first error is given.
    pub fn stop(&mut self) -> Result<Vec<NodeExit>, ClusterError> {
        self.stop_unless(|| false)
    }

    /// The same, but kills what is left as soon as `hurry` says so.
    pub fn stop_unless(&mut self, hurry: impl Fn() -> bool) -> Result<Vec<NodeExit>, ClusterError> {
        let mut first_error = None;
        for node in &mut self.nodes {
            if let Err(error) = node.ask_to_stop() {
                first_error.get_or_insert(error);
            }
        }
        let deadline = Instant::now() + self.stop_timeout;
        let mut exits = Vec::new();
        for node in &mut self.nodes {
            match node.finish_stop(deadline, &hurry) {
                Ok(exit) => exits.push(exit),
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        first_error.map_or(Ok(exits), Err)
    }

    /// Kills all brokers at once.
    pub fn kill(&mut self) {
        for node in &mut self.nodes {
            // Dropping the child kills it as well; there is nothing more to try.
            let _ = node.kill();
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Asked first, so that an orderly broker has its chance; the rest is killed.
        let _ = self.stop();
        self.kill();
    }
}

fn child_spec(spec: &ClusterSpec, plan: &ClusterPlan, index: usize, node: &NodePlan) -> ChildSpec {
    let site = spec.sites.get(index);
    let launcher = site.and_then(|site| site.launcher.split_first());
    let (program, mut args) = match launcher {
        None => (spec.program.path.clone(), Vec::new()),
        Some((program, launch)) => {
            let broker = OsString::from(&spec.program.path);
            (
                program.into(),
                launch.iter().cloned().chain([broker]).collect(),
            )
        }
    };
    args.extend(spec.program.args.iter().cloned());
    let mut flag = |name: &str, value: OsString| {
        args.push(name.into());
        args.push(value);
    };
    flag("--node-id", node.node_id.as_str().into());
    flag("--data-dir", node.data_dir.clone().into());
    flag("--catalog", plan.catalog.clone().into());
    flag("--client-listen", node.client_addr.to_string().into());
    flag("--internal-listen", node.internal_addr.to_string().into());
    flag("--admin-listen", node.admin_addr.to_string().into());
    flag(
        "--client-cert",
        node.certificates.client_cert.clone().into(),
    );
    flag("--client-key", node.certificates.client_key.clone().into());
    let cores = match spec.cpus.get(index) {
        // "2-2": a number alone would be a count.
        Some(cpus) if !cpus.is_empty() => cpus
            .iter()
            .map(|cpu| format!("{cpu}-{cpu}"))
            .collect::<Vec<_>>()
            .join(","),
        Some(_) | None => spec.cores_per_node.to_string(),
    };
    flag("--cores", cores.into());
    if let Some(depth) = spec.queue_depth {
        flag("--queue-depth", depth.to_string().into());
    }
    args.extend(spec.extra_args.iter().map(OsString::from));
    let path = |p: &Path| p.display().to_string();
    let mut env = vec![
        (
            "FELIX_INTERNAL_TLS_CERT".to_string(),
            path(&node.certificates.peer_cert),
        ),
        (
            "FELIX_INTERNAL_TLS_KEY".to_string(),
            path(&node.certificates.peer_key),
        ),
        ("FELIX_INTERNAL_TLS_CA".to_string(), path(&plan.ca)),
    ];
    env.extend(spec.env.iter().cloned());
    ChildSpec {
        program,
        args,
        env,
        log: node.log.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::spec::{BrokerProgram, NodeSite};
    use super::*;

    /// A "broker" that is a shell script.
    fn scripted(dir: &Path, nodes: usize, script: &str) -> ClusterSpec {
        let program = BrokerProgram {
            path: "/bin/sh".into(),
            args: vec!["-c".into(), script.into(), "broker".into()],
        };
        let mut spec = ClusterSpec::new(dir, nodes, program);
        spec.stop_timeout = Duration::from_millis(500);
        spec.ready_timeout = Duration::from_millis(300);
        spec
    }

    fn wait_for_log(node: &BrokerNode, text: &str) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !node.log_tail().contains(text) {
            assert!(Instant::now() < deadline, "{:?}", node.log_tail());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_broker_that_dies_is_reported_with_its_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let spec = scripted(dir.path(), 2, "echo no memory for rings >&2; exit 4");
        let error = Cluster::start(&spec).unwrap_err().to_string();
        assert!(error.contains("exit status 4"), "{error}");
        assert!(error.contains("no memory for rings"), "{error}");
    }

    #[test]
    fn a_broker_that_never_answers_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let spec = scripted(dir.path(), 1, "exec sleep 600");
        let error = Cluster::start(&spec).unwrap_err();
        assert!(matches!(error, ClusterError::NotReady { .. }), "{error}");
    }

    #[test]
    fn flags_and_environment_reach_the_broker() {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = scripted(
            dir.path(),
            2,
            "echo \"$@ CA=$FELIX_INTERNAL_TLS_CA X=$X end\"; exec sleep 600",
        );
        spec.cpus = vec![vec![0], vec![1, 3]];
        spec.extra_args = vec!["--spin-us".into(), "50".into()];
        spec.env = vec![("X".into(), "y".into())];
        let mut cluster = Cluster::prepare(&spec).unwrap();
        cluster.node_mut(1).start().unwrap();
        wait_for_log(cluster.node(1), "end\n");
        let log = cluster.node(1).log_tail();
        for part in [
            "--node-id node-2 ",
            "--cores 1-1,3-3 ",
            "--spin-us 50 ",
            "/ca.pem X=y end",
            &format!("--admin-listen {}", cluster.node(1).admin_addr()),
        ] {
            assert!(log.contains(part), "{part:?} not in {log}");
        }
        assert_eq!(cluster.node(0).pid(), None);
        cluster.kill();
    }

    #[test]
    fn a_site_gives_the_address_and_launches_the_broker() {
        let dir = tempfile::tempdir().unwrap();
        let mut spec = scripted(dir.path(), 2, "echo \"$VIA $@ end\"; exec sleep 600");
        spec.sites = vec![NodeSite {
            ip: "127.0.0.9".parse().unwrap(),
            launcher: vec!["env".into(), "VIA=launched".into()],
        }];
        let mut cluster = Cluster::prepare(&spec).unwrap();
        for node in cluster.nodes_mut() {
            node.start().unwrap();
        }
        wait_for_log(cluster.node(0), "end\n");
        wait_for_log(cluster.node(1), "end\n");
        let log = cluster.node(0).log_tail();
        assert!(log.starts_with("launched --node-id node-1 "), "{log}");
        assert!(log.contains("--client-listen 127.0.0.9:"), "{log}");
        assert!(cluster.node(1).log_tail().starts_with(" --node-id node-2 "));
        assert!(cluster.node(1).client_addr().ip().is_loopback());
        let certificate = std::fs::read(dir.path().join("node-1/client-cert.pem")).unwrap();
        let (_, pem) = x509_parser::pem::parse_x509_pem(&certificate).unwrap();
        let parsed = pem.parse_x509().unwrap();
        let names = parsed.subject_alternative_name().unwrap().unwrap();
        let address = x509_parser::prelude::GeneralName::IPAddress(&[127, 0, 0, 9]);
        assert!(names.value.general_names.contains(&address));
        cluster.kill();
    }

    #[test]
    fn stopping_asks_all_and_kills_the_deaf() {
        let dir = tempfile::tempdir().unwrap();
        let script = "trap 'exit 0' TERM; case \"$*\" in *node-2*) trap '' TERM;; esac; \
                      echo up; while :; do sleep 0.02; done";
        let spec = scripted(dir.path(), 2, script);
        let mut cluster = Cluster::prepare(&spec).unwrap();
        for node in cluster.nodes_mut() {
            node.start().unwrap();
        }
        wait_for_log(cluster.node(0), "up");
        wait_for_log(cluster.node(1), "up");
        let exits = cluster.stop().unwrap();
        assert_eq!(exits[0].to_string(), "node-1: exit status 0");
        assert!(exits[0].is_clean());
        assert_eq!(
            exits[1].to_string(),
            "node-2: signal 9, killed at the deadline"
        );
        assert!(!exits[1].is_clean());
        // Stopping twice is harmless.
        assert!(cluster.stop().unwrap().iter().all(NodeExit::is_clean));
    }

    #[test]
    fn tokens_verify_with_the_keys_of_the_catalog() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = Cluster::prepare(&scripted(dir.path(), 1, "exit 0")).unwrap();
        let token = cluster.token(Duration::from_secs(60)).unwrap();
        let report = cluster.report(&token);
        for key in [
            "dir",
            "ca",
            "token",
            "tenant",
            "namespace",
            "stream",
            "cache",
            "signing_key",
            "nodes",
        ] {
            assert!(!report[key].is_null(), "{key}");
        }
        let catalog = crate::catalog::CatalogFile::load(cluster.catalog()).unwrap();
        let mut verifier = crate::auth::Verifier::new(&catalog.catalog, 4);
        let now_s = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_secs();
        verifier.verify(&token, TENANT, now_s).unwrap();
        verifier.verify(&token, TENANT, now_s + 600).unwrap_err();
    }
}
