//! felix-bench: the load tool of felix-uring.
//!
//! It publishes as a client does, measures without hiding stalls, reads back every record it was told is
//! written, and sets what it measured beside what the machine does without a broker.
//!
//! * [`schedule`], [`meter`], [`record`], [`verify`]: pure; when a batch is due, what is measured, what a
//!   record is, and whether the log holds what was acknowledged.
//! * [`client`]: the load loop on one core, and the reader.
//! * [`relay`], [`transport`], [`disk`]: the machine without a broker.
//! * [`forward`], [`lose`], [`replicate`], [`idle`], [`cache`], [`subscribe`], [`limits`], [`append`], [`compare`],
//!   [`plot`]: the commands.

pub mod append;
pub mod cache;
pub mod cli;
pub mod client;
pub mod compare;
pub mod cpu;
pub mod disk;
pub mod forward;
pub mod idle;
pub mod limits;
pub mod lose;
pub mod meter;
pub mod place;
pub mod plot;
pub mod record;
pub mod relay;
pub mod replicate;
pub mod report;
pub mod run_args;
pub mod schedule;
pub mod subscribe;
pub mod transport;
pub mod units;
pub mod verify;

/// The transport measurements over another QUIC driver.
pub mod quic {
    pub mod tokio_side;
}
