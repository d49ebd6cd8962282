//! The transport alone: our QUIC driver beside tokio and quinn, in the same run and on the same CPUs.

mod command;
mod measure;
mod server;

pub use command::{run_quic, QuicArgs};
pub use measure::{measure, Shape};
pub use server::{run_server, ServerArgs, ServerProcess, Side};
