//! Network namespaces: hosts on a switch of their own, whose links can be cut in one direction.
//!
//! Every host is a namespace with one interface, all of them on the bridge of one more namespace, the hub. The
//! hub reaches every host whatever is cut between hosts, so that a test there can go on asking brokers
//! how they are. The namespaces have no names: they live as long as the descriptors held here and the processes
//! inside, so nothing is left behind by a test that is killed.
//!
//! A cut is a wrong hardware address for the other host: packets leave and arrive nowhere, and the sender is told
//! nothing, as when a cable or a switch fails. It needs neither packet filters nor queueing modules of
//! the kernel. Loss and delay are the business of `udp_relay`.
//!
//! Making namespaces takes privileges. [`Net::or_skip`] says on standard error why a test does not run; with
//! `FELIX_NETNS=required` it fails instead.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

use felix_uring::cluster::NodeSite;

const HUB: u8 = 254;

/// A namespace, alive as long as this.
struct Space(File);

impl Space {
    fn make() -> Result<Self, String> {
        // The thread that makes it is the only one moved into it, and ends with it.
        let made = std::thread::spawn(|| {
            // SAFETY: no memory is touched; the call changes the namespace of this thread alone.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
            File::open("/proc/thread-self/ns/net")
        });
        match made.join() {
            Ok(Ok(file)) => Ok(Self(file)),
            Ok(Err(error)) => Err(format!("no network namespace could be made: {error}")),
            Err(_) => Err("the thread that makes a namespace panicked".into()),
        }
    }

    /// A name of it that other processes can open.
    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    fn prefix(&self) -> Vec<OsString> {
        vec!["nsenter".into(), format!("--net={}", self.path()).into()]
    }

    /// Moves the calling thread here.
    fn enter(&self) -> std::io::Result<()> {
        // SAFETY: the descriptor is open as long as `self`; the call changes this thread alone.
        match unsafe { libc::setns(self.0.as_raw_fd(), libc::CLONE_NEWNET) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    /// Runs lines of `ip` here.
    fn ip(&self, lines: &str) -> Result<(), String> {
        let mut command = command_of(&self.prefix(), "ip");
        let child = command
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = child.map_err(|e| format!("nsenter and ip are needed: {e}"))?;
        let mut stdin = child.stdin.take().expect("a pipe was asked for");
        let written = stdin.write_all(lines.as_bytes());
        drop(stdin);
        let ended = child.wait_with_output().map_err(|e| e.to_string())?;
        let said = String::from_utf8_lossy(&ended.stderr);
        match (written, ended.status.success()) {
            (Ok(()), true) => Ok(()),
            (_, _) => Err(format!("{said}of\n{lines}")),
        }
    }
}

fn command_of(prefix: &[OsString], program: &str) -> Command {
    let mut command = Command::new(&prefix[0]);
    command.args(&prefix[1..]).arg(program);
    command
}

/// Hosts, numbered from 0, and the hub.
pub struct Net {
    hub: Space,
    hosts: Vec<Space>,
}

impl Net {
    /// Makes the namespaces and their links. Err says why this system does not allow it.
    pub fn of(hosts: usize) -> Result<Self, String> {
        assert!(hosts < usize::from(HUB), "one octet numbers the hosts");
        let net = Self {
            hub: Space::make()?,
            hosts: (0..hosts)
                .map(|_| Space::make())
                .collect::<Result<_, _>>()?,
        };
        let mut lines = format!(
            "link set lo up\nlink add switch address {} type bridge\nlink set switch up\naddr add {}/24 dev switch\n",
            hardware(HUB),
            address(HUB)
        );
        for (index, host) in net.hosts.iter().enumerate() {
            let _ = write!(
                lines,
                "link add port{index} type veth peer name eth0 netns {}\nlink set port{index} master switch up\n\
                 neigh replace {} lladdr {} dev switch nud permanent\n",
                host.path(),
                address(number(index)),
                hardware(number(index)),
            );
        }
        net.hub.ip(&lines)?;
        for index in 0..hosts {
            let (own, octet) = (&net.hosts[index], number(index));
            own.ip(&format!(
                "link set lo up\nlink set eth0 address {} up\naddr add {}/24 dev eth0\n",
                hardware(octet),
                address(octet)
            ))?;
            net.know_all(index)?;
        }
        Ok(net)
    }

    /// The same; without permission it says so and gives nothing.
    pub fn or_skip(hosts: usize, test: &str) -> Option<Self> {
        match Self::of(hosts) {
            Ok(net) => Some(net),
            Err(why) if std::env::var("FELIX_NETNS").as_deref() == Ok("required") => {
                panic!("{test}: {why}")
            }
            Err(why) => {
                eprintln!("SKIPPED {test}: {why}");
                None
            }
        }
    }

    /// The address of a host, the same seen from everywhere.
    pub fn ip(&self, host: usize) -> IpAddr {
        assert!(host < self.hosts.len(), "no host {host}");
        address(number(host)).into()
    }

    /// Where the brokers of a cluster live: node n on host n.
    pub fn sites(&self) -> Vec<NodeSite> {
        let sites = self.hosts.iter().enumerate();
        sites
            .map(|(index, host)| NodeSite {
                ip: self.ip(index),
                launcher: host.prefix(),
            })
            .collect()
    }

    /// Runs `work` on a thread in the hub, and so every thread and socket that it makes.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let ended = std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                self.hub.enter().expect("a namespace made here");
                work()
            });
            inside.join()
        });
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Runs a future of a test in the hub.
    pub fn block_on<T: Send>(&self, work: impl std::future::Future<Output = T> + Send) -> T {
        self.run(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build();
            runtime.expect("a runtime").block_on(work)
        })
    }

    /// From now on nothing that `from` sends arrives at `to`; the other direction is left as it is.
    pub fn cut(&self, from: usize, to: usize) {
        // No interface has this address.
        self.know(from, number(to), "02:00:00:00:00:ff");
    }

    /// What `from` sends arrives at `to` again.
    pub fn heal(&self, from: usize, to: usize) {
        self.know(from, number(to), &hardware(number(to)));
    }

    /// Both directions.
    pub fn cut_both(&self, a: usize, b: usize) {
        self.cut(a, b);
        self.cut(b, a);
    }

    /// Heals every cut.
    pub fn heal_all(&self) {
        for host in 0..self.hosts.len() {
            self.know_all(host)
                .unwrap_or_else(|e| panic!("host {host}: {e}"));
        }
    }

    /// Takes the interface of a host down: what it sends fails at once, and not even the hub reaches it.
    pub fn unplug(&self, host: usize) {
        let done = self.hosts[host].ip("link set eth0 down\n");
        done.unwrap_or_else(|e| panic!("host {host}: {e}"));
    }

    /// Brings the interface up again, without any cut towards others.
    pub fn plug(&self, host: usize) {
        let done = self.hosts[host].ip("link set eth0 up\n");
        // The system forgets its neighbours with the link.
        let done = done.and_then(|()| self.know_all(host));
        done.unwrap_or_else(|e| panic!("host {host}: {e}"));
    }

    fn know(&self, from: usize, to: u8, hardware: &str) {
        let line = neighbour(to, hardware);
        let done = self.hosts[from].ip(&line);
        done.unwrap_or_else(|e| panic!("host {from}: {e}"));
    }

    /// Gives a host the addresses of all others, so that it never has to ask for one.
    fn know_all(&self, host: usize) -> Result<(), String> {
        let others = (0..self.hosts.len()).filter(|other| *other != host);
        let lines: String = others
            .map(number)
            .chain([HUB])
            .map(|to| neighbour(to, &hardware(to)))
            .collect();
        self.hosts[host].ip(&lines)
    }
}

fn neighbour(to: u8, hardware: &str) -> String {
    format!(
        "neigh replace {} lladdr {hardware} dev eth0 nud permanent\n",
        address(to)
    )
}

/// The last octet of a host's address.
fn number(host: usize) -> u8 {
    u8::try_from(host + 1).expect("few hosts")
}

fn address(octet: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 111, 0, octet)
}

fn hardware(octet: u8) -> String {
    format!("02:00:00:00:00:{octet:02x}")
}
