//! Starting the relay's two processes.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use felix_uring::cluster::{Authority, ChildProcess, ChildSpec, NodeCertificates};
use felix_uring::ids::NodeId;

use super::net::{INGRESS_ID, OWNER_ID};

/// Making the journal takes most of it.
const START_PATIENCE: Duration = Duration::from_secs(30);

/// The running relay; its processes end when it is dropped.
pub struct RelayPair {
    ingress: ChildProcess,
    owner: ChildProcess,
    addr: SocketAddr,
    owner_addr: SocketAddr,
    dir: PathBuf,
}

impl RelayPair {
    /// Starts both in `dir`, which must allow direct I/O, on these CPUs.
    pub fn start(dir: &Path, ingress_cpu: usize, owner_cpu: usize) -> Result<Self> {
        std::fs::create_dir_all(dir)?;
        let program = std::env::current_exe()?;
        let authority = Authority::open_or_create(dir, 30)?;
        let ca = authority.ca_path();
        let start = |name: &str, id: &str, cpu: usize, more: &[(&str, OsString)]| {
            let node = NodeId::new(id).map_err(|error| anyhow::anyhow!("{error}"))?;
            let home = dir.join(id);
            let files = authority.issue_node(&home, &node, &[])?;
            let ready = home.join("ready");
            let mut args: Vec<OsString> = vec![name.into()];
            let common = common_flags(&ca, &files, &ready, cpu);
            for (flag, value) in common.iter().chain(more) {
                args.push(flag.into());
                args.push(value.clone());
            }
            if name == "relay-ingress" {
                args.extend(["--client-cert".into(), files.client_cert.into()]);
                args.extend(["--client-key".into(), files.client_key.into()]);
            }
            let mut child = ChildProcess::start(&ChildSpec {
                program: program.clone(),
                args,
                env: Vec::new(),
                log: home.join("log"),
            })?;
            let addr = wait_ready(&mut child, &ready).with_context(|| name.to_string())?;
            anyhow::Ok((child, addr))
        };
        let (owner, owner_addr) = start("relay-owner", OWNER_ID, owner_cpu, &[("--dir", dir.into())])?;
        let to_owner = [("--owner", OsString::from(owner_addr.to_string()))];
        let (ingress, addr) = start("relay-ingress", INGRESS_ID, ingress_cpu, &to_owner)?;
        Ok(Self {
            ingress,
            owner,
            addr,
            owner_addr,
            dir: dir.to_path_buf(),
        })
    }

    /// Where clients of the forwarding relay connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Where the owner listens.
    pub fn owner_addr(&self) -> SocketAddr {
        self.owner_addr
    }

    /// The authority of its certificates.
    pub fn ca(&self) -> PathBuf {
        self.dir.join("ca.pem")
    }

    /// Process ids of ingress and owner.
    pub fn pids(&self) -> [u32; 2] {
        [self.ingress.pid(), self.owner.pid()]
    }

    /// An error with its last words when a process has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        for (name, child) in [("ingress", &mut self.ingress), ("owner", &mut self.owner)] {
            if let Some(status) = child.poll_exit()? {
                bail!("the relay's {name} ended ({status}): {}", child.log_tail());
            }
        }
        Ok(())
    }
}

fn common_flags(
    ca: &Path,
    files: &NodeCertificates,
    ready: &Path,
    cpu: usize,
) -> [(&'static str, OsString); 6] {
    [
        ("--listen", "127.0.0.1:0".into()),
        ("--cpu", cpu.to_string().into()),
        ("--ready", ready.into()),
        ("--ca", ca.into()),
        ("--peer-cert", files.peer_cert.clone().into()),
        ("--peer-key", files.peer_key.clone().into()),
    ]
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
