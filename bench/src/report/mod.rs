//! What a run came to: the report as data, in words, and where recorded runs go.

mod host;
mod model;
mod record;
mod text;

pub use host::{commit, describe_host, utc_now};
pub use model::{
    BrokerAccount, CopyCounts, Host, Limits, OneOutstanding, Round, RunReport, RunResult, Workload,
    SCHEMA,
};
pub use record::{record_dir, write_json};
pub use text::{count, micros, percentiles, render};
