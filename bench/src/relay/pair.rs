//! Starting the relay's processes: ingress and owner, and replicas of the owner when records have copies.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use felix_uring::cluster::{Authority, ChildProcess, ChildSpec};
use felix_uring::ids::NodeId;

use super::net::{INGRESS_ID, OWNER_ID};
use crate::cpu::process_cpu_seconds_of;

/// Making the journal takes most of it.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// Where the relay's processes run, and how they wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayPlan {
    /// Of the ingress; without it clients connect to the owner.
    pub ingress: Option<usize>,
    /// Of the owner.
    pub owner: usize,
    /// Of the owners that are handed every durable batch.
    pub replicas: Vec<usize>,
    /// The owner answers only once one of them has a batch.
    pub await_replica: bool,
    /// How long both look for work before they wait.
    pub spin_us: u64,
}

/// The running relay; its processes end when it is dropped.
pub struct RelayPair {
    ingress: Option<ChildProcess>,
    owner: ChildProcess,
    replicas: Vec<ChildProcess>,
    addr: SocketAddr,
    dir: PathBuf,
}

impl RelayPair {
    /// Starts it in `dir`, which must allow direct I/O.
    pub fn start(dir: &Path, plan: RelayPlan) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let authority = Authority::open_or_create(dir, 30)?;
        let mut replicas = Vec::new();
        let mut owner_flags = vec![("--dir", Some(OsString::from(dir)))];
        for (nth, cpu) in plan.replicas.iter().enumerate() {
            let home = dir.join(format!("replica-{nth}"));
            std::fs::create_dir_all(&home)?;
            let replica = Starter {
                authority: &authority,
                home: home.clone(),
                id: OWNER_ID,
                cpu: *cpu,
                spin_us: plan.spin_us,
                takes_clients: false,
            };
            let flags = [("--dir", Some(home.into()))];
            let (child, addr) = replica.start("relay-owner", &flags)?;
            replicas.push(child);
            owner_flags.push(("--replica", Some(addr.to_string().into())));
        }
        if plan.await_replica && !replicas.is_empty() {
            owner_flags.push(("--await-replica", None));
        }
        let owner = Starter {
            authority: &authority,
            home: dir.join(OWNER_ID),
            id: OWNER_ID,
            cpu: plan.owner,
            spin_us: plan.spin_us,
            takes_clients: plan.ingress.is_none(),
        };
        let (owner, owner_addr) = owner.start("relay-owner", &owner_flags)?;
        let (ingress, addr) = match plan.ingress {
            None => (None, owner_addr),
            Some(cpu) => {
                let to_owner = [("--owner", Some(OsString::from(owner_addr.to_string())))];
                let ingress = Starter {
                    authority: &authority,
                    home: dir.join(INGRESS_ID),
                    id: INGRESS_ID,
                    cpu,
                    spin_us: plan.spin_us,
                    takes_clients: true,
                };
                let (child, addr) = ingress.start("relay-ingress", &to_owner)?;
                (Some(child), addr)
            }
        };
        Ok(Self {
            ingress,
            owner,
            replicas,
            addr,
            dir: dir.to_path_buf(),
        })
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The authority of its certificates.
    pub fn ca(&self) -> PathBuf {
        self.dir.join("ca.pem")
    }

    /// CPU seconds ingress and owner have used.
    pub fn cpu_seconds(&self) -> [f64; 2] {
        let of = |child: &ChildProcess| process_cpu_seconds_of(child.pid()).unwrap_or(0.0);
        [self.ingress.as_ref().map_or(0.0, of), of(&self.owner)]
    }

    /// An error with its last words when a process has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        let ingress = self.ingress.as_mut().map(|child| ("ingress", child));
        let replicas = self.replicas.iter_mut().map(|child| ("replica", child));
        let all = ingress
            .into_iter()
            .chain([("owner", &mut self.owner)])
            .chain(replicas);
        for (name, child) in all {
            if let Some(status) = child.poll_exit()? {
                bail!("the relay's {name} ended ({status}): {}", child.log_tail());
            }
        }
        Ok(())
    }
}

/// What one of the processes is started with.
pub(crate) struct Starter<'a> {
    pub authority: &'a Authority,
    /// Its directory.
    pub home: PathBuf,
    /// The node id in its certificates.
    pub id: &'static str,
    pub cpu: usize,
    pub spin_us: u64,
    /// It is given a certificate towards clients.
    pub takes_clients: bool,
}

impl Starter<'_> {
    pub fn start(
        &self,
        command: &str,
        more: &[(&str, Option<OsString>)],
    ) -> Result<(ChildProcess, SocketAddr)> {
        let node = NodeId::new(self.id).map_err(|error| anyhow::anyhow!("{error}"))?;
        let files = self.authority.issue_node(&self.home, &node, &[])?;
        let ready = self.home.join("ready");
        let mut flags: Vec<(&str, OsString)> = vec![
            ("--listen", "127.0.0.1:0".into()),
            ("--cpu", self.cpu.to_string().into()),
            ("--spin-us", self.spin_us.to_string().into()),
            ("--ready", ready.clone().into()),
            ("--ca", self.authority.ca_path().into()),
            ("--peer-cert", files.peer_cert.into()),
            ("--peer-key", files.peer_key.into()),
        ];
        if self.takes_clients {
            flags.push(("--client-cert", files.client_cert.into()));
            flags.push(("--client-key", files.client_key.into()));
        }
        let mut args: Vec<OsString> = vec![command.into()];
        for (flag, value) in flags {
            args.extend([flag.into(), value]);
        }
        for (flag, value) in more {
            args.push(flag.into());
            args.extend(value.clone());
        }
        let mut child = ChildProcess::start(&ChildSpec {
            program: std::env::current_exe()?,
            args,
            env: Vec::new(),
            log: self.home.join("log"),
        })?;
        let addr = wait_ready(&mut child, &ready).with_context(|| command.to_string())?;
        Ok((child, addr))
    }
}

fn wait_ready(child: &mut ChildProcess, ready: &Path) -> Result<SocketAddr> {
    let give_up = Instant::now() + START_PATIENCE;
    loop {
        if let Ok(text) = std::fs::read_to_string(ready) {
            return Ok(text.trim().parse()?);
        }
        if let Some(status) = child.poll_exit()? {
            bail!("ended with {status}: {}", child.log_tail());
        }
        if Instant::now() > give_up {
            bail!("not ready after {START_PATIENCE:?}: {}", child.log_tail());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
