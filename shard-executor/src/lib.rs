//! One pinned executor a core, and the bounded lanes between them.
//!
//! Duty: start and stop the executors ([`rt`]), move items between cores ([`mesh`]) and from
//! control threads to cores ([`inbox`]), place threads on CPUs ([`topology`]), and notice cores that
//! stop turning ([`stall`]) or panic ([`panic_exit`]).
//!
//! It does not know what the items mean, opens no socket and no log. All use of glommio outside
//! file I/O sits behind [`rt`], with every workaround its version 0.9 needs, so that its bugs and
//! its replacement stay local.
//!
//! Invariants:
//! * A lane belongs to one ordered pair of cores: items on it arrive in the order sent.
//! * No queue here is unbounded; a full one hands the item back to the sender and is counted.
//! * A sleeping receiver is always woken after [`mesh::MeshPort::flush_wakes`]; no wake can fall
//!   between its last look at the lanes and its going to sleep.

mod doorbell;
pub mod inbox;
pub mod memlock;
pub mod mesh;
pub mod panic_exit;
pub mod rt;
pub mod signal;
pub mod stall;
pub mod topology;

pub use inbox::{inbox, Inbox, InboxFull, InboxSender};
pub use mesh::{LaneFull, Mesh, MeshPort};
pub use panic_exit::install_panic_exit;
pub use signal::Signal;
pub use stall::{Heartbeat, StallMonitor};
