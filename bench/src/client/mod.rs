//! The load-generating client, and the reader that gets records back from a running cluster.

mod hear;
mod issue;
mod lanes;
mod load;
mod reader;
mod speak;
mod spec;
mod trust;

pub use load::{load_pump, run_load, transport_settings, wait};
pub use reader::{ask_owners, ask_width, read_shard, ReadPlan, StreamWidth};
pub use speak::{auth_message, key_of_put, FelixNames, Heard, Protocol, Speaker, KEYS_OF_A_WRITER};
pub use spec::{LoadError, LoadReport, LoadSpec, Progress, Tally, Target};
pub use trust::trust;
