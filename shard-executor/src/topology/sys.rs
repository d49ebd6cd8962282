//! Reading the machine from `/sys` and the thread's affinity from the kernel.

use std::io;
use std::path::Path;

use super::request::parse_cpu_list;
use super::Cpu;

/// The online CPUs of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    cpus: Vec<Cpu>,
}

impl Topology {
    /// Builds a topology from known CPUs (sorted by number here).
    pub fn from_cpus(mut cpus: Vec<Cpu>) -> Self {
        cpus.sort_by_key(|cpu| cpu.id);
        Self { cpus }
    }

    /// Reads `<root>/sys/devices/system`; `root` is `/` outside of tests.
    ///
    /// Containers hide parts of `/sys`: a CPU without core information counts as a core of its
    /// own, one without a node as node 0.
    ///
    /// # Errors
    /// When even the list of online CPUs cannot be read.
    pub fn read(root: &Path) -> io::Result<Self> {
        let system = root.join("sys/devices/system");
        let online = read_list(&system.join("cpu/online"))?;
        let nodes = read_nodes(&system.join("node"));
        let cpus = online
            .iter()
            .map(|&id| {
                let list = system.join(format!("cpu/cpu{id}/topology/thread_siblings_list"));
                let mut siblings = read_list(&list).unwrap_or_else(|_| vec![id]);
                siblings.retain(|cpu| online.contains(cpu));
                let node = nodes
                    .iter()
                    .find(|(_, cpus)| cpus.contains(&id))
                    .map_or(0, |n| n.0);
                Cpu { id, node, siblings }
            })
            .collect();
        Ok(Self::from_cpus(cpus))
    }

    /// Reads the running machine.
    ///
    /// # Errors
    /// As [`Topology::read`].
    pub fn read_host() -> io::Result<Self> {
        Self::read(Path::new("/"))
    }

    /// The online CPUs by number.
    pub fn cpus(&self) -> &[Cpu] {
        &self.cpus
    }

    /// The CPU with this number, if it is online.
    pub fn cpu(&self, id: usize) -> Option<&Cpu> {
        self.cpus.iter().find(|cpu| cpu.id == id)
    }
}

fn read_list(path: &Path) -> io::Result<Vec<usize>> {
    let text = std::fs::read_to_string(path)?;
    parse_cpu_list(&text).map_err(|error| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{}: {error}", path.display()),
        )
    })
}

fn read_nodes(dir: &Path) -> Vec<(usize, Vec<usize>)> {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let number = path
                .file_name()?
                .to_str()?
                .strip_prefix("node")?
                .parse()
                .ok()?;
            // A node without CPUs has an empty list, which is no list: it is left out.
            Some((number, read_list(&path.join("cpulist")).ok()?))
        })
        .collect()
}

/// The CPUs the calling thread may run on (its affinity mask: taskset, cpusets, containers).
///
/// # Errors
/// When the kernel does not tell.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    // SAFETY: an all-zero set is a valid value of this plain bit array.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is live and of the size given.
    let result = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: every number is below the size of the set.
    Ok((0..libc::CPU_SETSIZE as usize)
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
        .collect())
}

/// Lets the calling thread, and threads it starts later, run on these CPUs only.
///
/// # Errors
/// When no CPU of the list exists or may be used.
pub fn pin_current_thread(cpus: &[usize]) -> io::Result<()> {
    // SAFETY: as in `allowed_cpus`.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus.iter().filter(|&&cpu| cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: the number is below the size of the set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: `set` is live and of the size given.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join("sys/devices/system").join(path);
        fs::create_dir_all(path.parent().expect("parent")).expect("directories");
        fs::write(path, text).expect("file");
    }

    #[test]
    fn reads_nodes_siblings_and_holes() {
        let root = tempfile::tempdir().expect("directory");
        write(root.path(), "cpu/online", "0-2,5\n");
        write(
            root.path(),
            "cpu/cpu0/topology/thread_siblings_list",
            "0,4\n",
        );
        write(
            root.path(),
            "cpu/cpu1/topology/thread_siblings_list",
            "1,5\n",
        );
        write(
            root.path(),
            "cpu/cpu5/topology/thread_siblings_list",
            "1,5\n",
        );
        write(root.path(), "node/node0/cpulist", "0-1,4-5\n");
        write(root.path(), "node/node1/cpulist", "2-3\n");
        write(root.path(), "node/node2/cpulist", "\n");
        let topology = Topology::read(root.path()).expect("readable");
        let cpu = |id, node, siblings: &[usize]| Cpu {
            id,
            node,
            siblings: siblings.into(),
        };
        let expected = [
            cpu(0, 0, &[0]),
            cpu(1, 0, &[1, 5]),
            cpu(2, 1, &[2]),
            cpu(5, 0, &[1, 5]),
        ];
        assert_eq!(topology.cpus(), expected);
        assert_eq!(topology.cpu(4), None, "offline");
    }

    #[test]
    fn a_machine_without_the_list_is_an_error() {
        let root = tempfile::tempdir().expect("directory");
        assert!(Topology::read(root.path()).is_err());
    }

    #[test]
    fn pinning_changes_the_mask_of_this_thread_only() {
        let before = allowed_cpus().expect("mask");
        let last = *before.last().expect("at least one");
        let inside = std::thread::spawn(move || {
            pin_current_thread(&[last]).expect("pinned");
            allowed_cpus().expect("mask")
        });
        assert_eq!(inside.join().expect("thread"), [last]);
        assert_eq!(allowed_cpus().expect("mask"), before);
        assert!(pin_current_thread(&[]).is_err());
    }
}
