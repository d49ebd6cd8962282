//! Counters, gauges and latency histograms, and their Prometheus text.
//!
//! Every data core owns one [`CoreMetrics`]; only that core writes it, so an increment is a plain
//! load and store and never a locked instruction. A [`MetricsHub`] on a control thread reads all
//! of them, adds them up and renders them. What exists, with its name and help text, is the one
//! list in `list.rs`: a new counter is one line there.
//!
//! This module does not decide what is counted and does not serve HTTP.
//!
//! Invariants: one writer a `CoreMetrics`; counters never go down; a reader may see the counters
//! of one core at slightly different instants, never a torn value.

mod cells;
mod hub;
mod labels;
mod list;

pub use cells::{Counter, Family, Gauge, Histogram, BUCKET_BOUNDS_US};
pub use hub::{reference, HistogramTotals, MetricsHub};
pub use labels::{
    AckOutcome, ClientCode, CloseReason, ConnectionRole, FrameFault, HaltLabel, HandshakeFault,
    InternalKind, PeerCode, ShipOutcome, SubscriberEnd, UnackedDrop, UnknownCause,
};
pub use list::{ControlMetrics, CoreMetrics};

/// A closed set of label values; what a [`Family`] is indexed by.
pub trait Label: Copy + 'static {
    /// The name of the Prometheus label.
    const KEY: &'static str;
    /// Every value, in index order.
    const VALUES: &'static [&'static str];
    /// Position in [`Label::VALUES`].
    fn index(self) -> usize;
}

/// What a value is, and how the values of several cores become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only goes up; cores are added.
    Counter,
    /// Goes up and down; cores are added.
    Gauge,
    /// The largest of the cores.
    GaugeMax,
    /// The smallest of the cores: each sees the same thing, for example one file system.
    GaugeMin,
    /// Goes up and down; one line a core.
    GaugePerCore,
    /// Only goes up; one line a core.
    CounterPerCore,
}

/// One declared metric, read from one core.
pub struct Sample<'a> {
    /// Field name, which is also the key in `/status`.
    pub key: &'static str,
    /// Prometheus name.
    pub name: &'static str,
    pub help: &'static str,
    pub value: SampleValue<'a>,
}

/// The cells behind a [`Sample`].
pub enum SampleValue<'a> {
    Number(Kind, u64),
    Family {
        label: &'static str,
        values: &'static [&'static str],
        numbers: Vec<u64>,
    },
    Histogram(&'a Histogram),
}
