//! Choosing CPUs for the data cores and for everything else.

use std::collections::BTreeMap;

use super::{CoreRequest, Cpu, Topology};

/// Which threads run where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The CPU of each data core, by core number.
    pub data: Vec<usize>,
    /// The CPUs for control threads.
    pub control: Vec<usize>,
    /// Things that will cost latency, to be logged once.
    pub warnings: Vec<String>,
}

/// The request cannot be met on this machine by this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// More cores than usable CPUs.
    #[error(
        "{wanted} cores were asked for, and this process may use {usable} CPUs ({}); ask for at \
         most {usable}, or widen the process's CPU set (taskset, AllowedCPUs= in a unit, \
         --cpuset-cpus for a container)", list(.allowed)
    )]
    TooFew {
        /// Cores asked for.
        wanted: usize,
        /// CPUs that are online and allowed.
        usable: usize,
        /// Which.
        allowed: Vec<usize>,
    },
    /// A listed CPU is not online.
    #[error("CPU {cpu} is not online; online are {}", list(.online))]
    NotOnline {
        /// The CPU.
        cpu: usize,
        /// The CPUs that are.
        online: Vec<usize>,
    },
    /// A listed CPU is outside the process's mask.
    #[error(
        "CPU {cpu} is online but this process may not use it (allowed: {}); widen its CPU set \
         (taskset, AllowedCPUs= in a unit, --cpuset-cpus for a container) or choose another",
        list(.allowed)
    )]
    NotAllowed {
        /// The CPU.
        cpu: usize,
        /// The CPUs it may use.
        allowed: Vec<usize>,
    },
}

/// Chooses CPUs for `request` out of those online and `allowed`.
///
/// A count takes distinct physical cores first, of one memory node as far as they reach, and
/// leaves the core of CPU 0 (where most interrupts and the kernel's own work land) for the last of
/// its node.
///
/// # Errors
/// When the machine or the process's CPU set does not have what is asked for.
pub fn place(
    request: &CoreRequest,
    topology: &Topology,
    allowed: &[usize],
) -> Result<Placement, PlacementError> {
    let usable: Vec<&Cpu> = topology
        .cpus()
        .iter()
        .filter(|c| allowed.contains(&c.id))
        .collect();
    let data = match request {
        CoreRequest::Count(count) => choose(*count, &usable)?,
        CoreRequest::List(cpus) => check_listed(cpus, topology, allowed)?,
    };
    let control = control_cpus(&data, &usable);
    let warnings = warnings(&data, &control, topology);
    Ok(Placement {
        data,
        control,
        warnings,
    })
}

fn check_listed(
    cpus: &[usize],
    topology: &Topology,
    allowed: &[usize],
) -> Result<Vec<usize>, PlacementError> {
    for &cpu in cpus {
        if topology.cpu(cpu).is_none() {
            let online = topology.cpus().iter().map(|c| c.id).collect();
            return Err(PlacementError::NotOnline { cpu, online });
        }
        if !allowed.contains(&cpu) {
            return Err(PlacementError::NotAllowed {
                cpu,
                allowed: allowed.to_vec(),
            });
        }
    }
    Ok(cpus.to_vec())
}

fn choose(count: usize, usable: &[&Cpu]) -> Result<Vec<usize>, PlacementError> {
    if count == 0 || count > usable.len() {
        let allowed = usable.iter().map(|cpu| cpu.id).collect();
        return Err(PlacementError::TooFew {
            wanted: count,
            usable: usable.len(),
            allowed,
        });
    }
    let mut order = preference(usable);
    order.truncate(count);
    // Core numbers follow CPU numbers: easier to read in `top` beside the logs.
    order.sort_unstable();
    Ok(order)
}

/// All usable CPUs, best first: one thread of every physical core, node by node (the largest
/// first), then the second threads in the same order.
fn preference(usable: &[&Cpu]) -> Vec<usize> {
    let is_usable = |id: &usize| usable.iter().any(|cpu| cpu.id == *id);
    let rank = |cpu: &Cpu| {
        cpu.siblings
            .iter()
            .filter(|s| is_usable(s) && **s < cpu.id)
            .count()
    };
    let mut cores_of_node: BTreeMap<usize, usize> = BTreeMap::new();
    for cpu in usable.iter().filter(|cpu| rank(cpu) == 0) {
        *cores_of_node.entry(cpu.node).or_default() += 1;
    }
    let mut order = usable.to_vec();
    order.sort_by_key(|cpu| {
        let cores = cores_of_node.get(&cpu.node).copied().unwrap_or(0);
        let shares_cpu_0 = cpu.siblings.contains(&0);
        (
            rank(cpu),
            std::cmp::Reverse(cores),
            cpu.node,
            shares_cpu_0,
            cpu.id,
        )
    });
    order.iter().map(|cpu| cpu.id).collect()
}

/// Everything not used by a data core nor by its sibling thread; failing that everything not used;
/// failing that all.
fn control_cpus(data: &[usize], usable: &[&Cpu]) -> Vec<usize> {
    let ids = |keep: &dyn Fn(&Cpu) -> bool| -> Vec<usize> {
        usable
            .iter()
            .filter(|cpu| keep(cpu))
            .map(|cpu| cpu.id)
            .collect()
    };
    let quiet = ids(&|cpu| {
        !cpu.siblings
            .iter()
            .chain([&cpu.id])
            .any(|s| data.contains(s))
    });
    let unused = ids(&|cpu| !data.contains(&cpu.id));
    [quiet, unused]
        .into_iter()
        .find(|cpus| !cpus.is_empty())
        .unwrap_or_else(|| ids(&|_| true))
}

fn warnings(data: &[usize], control: &[usize], topology: &Topology) -> Vec<String> {
    let mut warnings = Vec::new();
    if control.iter().all(|cpu| data.contains(cpu)) {
        warnings.push(
            "every usable CPU runs a data core: control threads and the kernel's work share them; \
             leave one CPU free for steadier latency"
                .to_owned(),
        );
    }
    let siblings = |cpu: &usize| {
        topology
            .cpu(*cpu)
            .map(|c| c.siblings.clone())
            .unwrap_or_default()
    };
    let pair = data.iter().find_map(|cpu| {
        siblings(cpu)
            .into_iter()
            .find(|s| s > cpu && data.contains(s))
            .map(|s| (*cpu, s))
    });
    if let Some((a, b)) = pair {
        warnings.push(format!(
            "CPUs {a} and {b} are threads of one physical core and both run data cores; each gets \
             about half of it"
        ));
    }
    let node = |cpu: &usize| topology.cpu(*cpu).map(|c| c.node);
    if data
        .iter()
        .any(|cpu| node(cpu) != data.first().and_then(node))
    {
        warnings.push(
            "the data cores span memory nodes; messages between them cross the interconnect"
                .to_owned(),
        );
    }
    warnings
}

fn list(cpus: &[usize]) -> String {
    let text: Vec<String> = cpus.iter().map(ToString::to_string).collect();
    text.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `nodes` nodes of `cores` cores of two threads; thread 1 of all cores is numbered last.
    fn machine(nodes: usize, cores: usize) -> Topology {
        let all = nodes * cores;
        let cpus = (0..2 * all).map(|id| {
            let core = id % all;
            Cpu {
                id,
                node: core / cores,
                siblings: vec![core, core + all],
            }
        });
        Topology::from_cpus(cpus.collect())
    }

    fn every(topology: &Topology) -> Vec<usize> {
        topology.cpus().iter().map(|cpu| cpu.id).collect()
    }

    #[test]
    fn a_count_takes_physical_cores_of_one_node_and_spares_cpu_0() {
        let machine = machine(2, 4);
        let all = every(&machine);
        let placed = place(&CoreRequest::Count(3), &machine, &all).expect("fits");
        assert_eq!(placed.data, [1, 2, 3]);
        assert_eq!(
            placed.control,
            [0, 4, 5, 6, 7, 8, 12, 13, 14, 15],
            "no siblings of data cores"
        );
        assert_eq!(placed.warnings, Vec::<String>::new());
        let placed = place(&CoreRequest::Count(5), &machine, &all).expect("fits");
        assert_eq!(placed.data, [0, 1, 2, 3, 4]);
        assert_eq!(
            placed.warnings.len(),
            1,
            "spans nodes: {:?}",
            placed.warnings
        );
    }

    #[test]
    fn hyperthreads_come_last_and_are_told() {
        let machine = machine(1, 2);
        let placed = place(&CoreRequest::Count(3), &machine, &every(&machine)).expect("fits");
        assert_eq!(placed.data, [0, 1, 3]);
        assert_eq!(placed.control, [2]);
        assert!(
            placed.warnings[0].contains("CPUs 1 and 3"),
            "{:?}",
            placed.warnings
        );
    }

    #[test]
    fn when_all_cpus_work_control_shares_them_with_a_warning() {
        let machine = machine(1, 1);
        let placed = place(&CoreRequest::Count(2), &machine, &[0, 1]).expect("fits");
        assert_eq!((placed.data, placed.control), (vec![0, 1], vec![0, 1]));
        assert!(placed.warnings[0].contains("leave one CPU free"));
    }

    #[test]
    fn the_larger_node_of_the_allowed_mask_wins() {
        let machine = machine(2, 4);
        let placed = place(&CoreRequest::Count(2), &machine, &[0, 4, 5, 6]).expect("fits");
        assert_eq!(placed.data, [4, 5]);
        assert_eq!(placed.control, [0, 6]);
    }

    #[test]
    fn a_list_is_taken_in_its_order_or_refused_with_the_remedy() {
        let machine = machine(1, 4);
        let list = |cpus: &[usize]| CoreRequest::List(cpus.into());
        let placed = place(&list(&[3, 1]), &machine, &[0, 1, 3]).expect("fits");
        assert_eq!((placed.data, placed.control), (vec![3, 1], vec![0]));
        let error = place(&list(&[2]), &machine, &[0, 1])
            .expect_err("not allowed")
            .to_string();
        assert!(
            error.contains("CPU 2") && error.contains("taskset"),
            "{error}"
        );
        let error = place(&list(&[64]), &machine, &[0, 1])
            .expect_err("offline")
            .to_string();
        assert!(
            error.contains("CPU 64 is not online; online are 0,1,2"),
            "{error}"
        );
        let error = place(&CoreRequest::Count(3), &machine, &[0, 1])
            .expect_err("few")
            .to_string();
        assert!(
            error.contains("3 cores") && error.contains("2 CPUs (0,1)"),
            "{error}"
        );
    }

    proptest! {
        #[test]
        fn placements_keep_their_invariants(
            nodes in 1..4_usize,
            cores in 1..5_usize,
            mask in any::<u64>(),
            count in 1..50_usize,
        ) {
            let machine = machine(nodes, cores);
            let mut allowed = every(&machine);
            allowed.retain(|cpu| mask & (1 << cpu) != 0);
            match place(&CoreRequest::Count(count), &machine, &allowed) {
                Err(PlacementError::TooFew { .. }) => prop_assert!(count > allowed.len()),
                Err(other) => prop_assert!(false, "{other}"),
                Ok(placed) => {
                    prop_assert_eq!(placed.data.len(), count);
                    prop_assert!(placed.data.windows(2).all(|w| w[0] < w[1]));
                    prop_assert!(placed.data.iter().all(|cpu| allowed.contains(cpu)));
                    prop_assert!(!placed.control.is_empty());
                    let spare = allowed.len() > count;
                    prop_assert!(!spare || placed.control.iter().all(|c| !placed.data.contains(c)));
                }
            }
        }
    }
}
