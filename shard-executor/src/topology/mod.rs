//! Which CPUs there are, which of them we may use, and which a data core gets.
//!
//! Duty: read the machine ([`Topology::read`]), understand `--cores` ([`CoreRequest`]) and choose
//! ([`place`]). Choosing is pure. It does not start anything; [`pin_current_thread`] is the only
//! function with an effect.
//!
//! Invariants of a [`Placement`]: data CPUs are online, allowed and distinct; there is at least one
//! control CPU; control CPUs avoid the data CPUs whenever another one is allowed.

mod place;
mod request;
mod sys;

pub use place::{place, Placement, PlacementError};
pub use request::{parse_cpu_list, CoreRequest, CoreRequestError};
pub use sys::{allowed_cpus, pin_current_thread, Topology};

/// One online CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// The kernel's number.
    pub id: usize,
    /// The memory node it belongs to (0 when unknown).
    pub node: usize,
    /// All CPUs of the same physical core, itself included, in order.
    pub siblings: Vec<usize>,
}
