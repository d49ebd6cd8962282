//! The broker on glommio: the event loop of a core, QUIC, storage, and what starts and stops them.

pub mod core;
mod data_dir;
pub mod quic;
mod recover;
mod secret;
mod serve;
mod settings;
mod signals;
mod watch;

pub use serve::{serve, ServeError, ServeSummary};
