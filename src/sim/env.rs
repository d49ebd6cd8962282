//! What all simulated brokers share: time, chance, the network, the catalog, the judge.

use std::collections::BTreeMap;

use super::catalog::SimCatalog;
use super::check::Judge;
use super::consumers::Consumers;
use super::core::CoreInput;
use super::faults::DiskCrash;
use super::network::{Network, NetworkEvent};
use super::operator::Replacement;
use super::queue::Queue;
use super::random::Random;
use super::reports::{Draft, Reports};
use super::subscribers::SubscriberEvent;
use super::trace::Trace;

/// One core of one life of a broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CoreAt {
    pub node: usize,
    pub core: usize,
    /// Grows with each start of the process; events of an earlier life mean nothing.
    pub incarnation: u32,
}

/// What happens next.
#[derive(Debug)]
pub enum Event {
    Network(NetworkEvent),
    Core {
        at: CoreAt,
        input: CoreInput,
    },
    /// A new catalog file lies on a broker's disk.
    FileArrives {
        node: usize,
        version: usize,
    },
    /// A broker looks at its catalog file.
    ReadFile {
        node: usize,
        incarnation: u32,
    },
    /// A client sends its next request.
    Request,
    /// A member of a consumer group does.
    GroupRequest,
    Subscriber(SubscriberEvent),
    /// The next fault of the plan.
    Strike,
    Restart {
        node: usize,
    },
    Resume {
        node: usize,
    },
    /// A broker's speed and space come back.
    Mend {
        node: usize,
    },
    Operator,
    MoveOn {
        shard: usize,
    },
    StopLeader(Replacement),
    /// A leader's report is before the engine.
    Report {
        at: CoreAt,
        shard: usize,
        draft: Draft,
    },
    /// A catalog file that must not be followed lies on a broker's disk for a moment.
    WrongFile {
        node: usize,
    },
    /// The next step of an arranged row of leaders.
    FigureEight,
    Promote(Replacement),
    /// The operator restarts a broker whose disk has failed.
    RestartFailed {
        node: usize,
        incarnation: u32,
    },
    /// One more write to every log of every replicated shard, so that idle copies settle.
    LastWords,
    /// From here on nothing is injected any more.
    Heal,
}

/// Faults, as they are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    DialFailed,
    DropConnection,
    ResetMidFrame,
    SplitFrame,
    Stall,
    OneWayCut,
    TwoWayCut,
    UnknownKind,
    DamagedBatch,
    LateDuplicate,
    Contradiction,
    FalseConflict,
    FalseRefusal,
    FalseRedirect,
    OldFile,
    FullLane,
    Shedding,
    BadCredential,
    Crash,
    CrashAtWrite,
    CrashAtSync,
    ShortWrite,
    FailedSync,
    SlowDisk,
    FullDisk,
    Pause,
    SlowPeer,
    ClockStep,
    StaleView,
    ShardMoved,
    LeaderIsolated,
    MoveBegun,
    MoveSwitched,
    LeaderReplaced,
    GenerationRaised,
    RaisedBase,
    FigureEight,
    /// The last look at the logs of such a row of leaders.
    FigureEightEnded,
    DamagedCopy,
    WrongFile,
    ReportFailed,
    ReportAnswerLost,
    PromotedByReport,
}

impl Fault {
    pub const fn name(self) -> &'static str {
        match self {
            Self::DialFailed => "dial_failed",
            Self::DropConnection => "drop_connection",
            Self::ResetMidFrame => "reset_mid_frame",
            Self::SplitFrame => "split_frame",
            Self::Stall => "stall",
            Self::OneWayCut => "one_way_cut",
            Self::TwoWayCut => "two_way_cut",
            Self::UnknownKind => "unknown_kind",
            Self::DamagedBatch => "damaged_batch",
            Self::LateDuplicate => "late_duplicate",
            Self::Contradiction => "contradiction",
            Self::FalseConflict => "false_conflict",
            Self::FalseRefusal => "false_refusal",
            Self::FalseRedirect => "false_redirect",
            Self::OldFile => "old_file",
            Self::FullLane => "full_lane",
            Self::Shedding => "shedding",
            Self::BadCredential => "bad_credential",
            Self::Crash => "crash",
            Self::CrashAtWrite => "crash_at_write",
            Self::CrashAtSync => "crash_at_sync",
            Self::ShortWrite => "short_write",
            Self::FailedSync => "failed_sync",
            Self::SlowDisk => "slow_disk",
            Self::FullDisk => "full_disk",
            Self::Pause => "pause",
            Self::SlowPeer => "slow_peer",
            Self::ClockStep => "clock_step",
            Self::StaleView => "stale_view",
            Self::ShardMoved => "shard_moved",
            Self::LeaderIsolated => "leader_isolated",
            Self::MoveBegun => "move_begun",
            Self::MoveSwitched => "move_switched",
            Self::LeaderReplaced => "leader_replaced",
            Self::GenerationRaised => "generation_raised",
            Self::RaisedBase => "raised_base",
            Self::FigureEight => "figure_eight",
            Self::FigureEightEnded => "figure_eight_ended",
            Self::DamagedCopy => "damaged_copy",
            Self::WrongFile => "wrong_file",
            Self::ReportFailed => "report_failed",
            Self::ReportAnswerLost => "report_answer_lost",
            Self::PromotedByReport => "promoted_by_report",
        }
    }
}

/// How often things go wrong in this run, drawn from the seed.
#[derive(Debug, Clone)]
pub struct Plan {
    pub nodes: usize,
    pub cores: usize,
    pub requests: usize,
    /// Virtual microseconds between requests, on average.
    pub request_gap_us: u64,
    pub strikes: usize,
    pub strike_gap_us: u64,
    pub moves: usize,
    pub group_requests: usize,
    /// The cache gets more than its share of requests and of new leaders.
    pub prefers_cache: bool,
    pub stall_per_mille: u64,
    pub dial_fails_per_mille: u64,
    pub shed_per_mille: u64,
    pub bad_credential_per_mille: u64,
    pub stale_view_per_mille: u64,
    pub lane_capacity: usize,
    /// Brokers from before the authorized kinds.
    pub legacy_nodes: Vec<bool>,
    pub sync_us: u64,
}

/// The world outside a broker's process.
#[derive(Debug)]
pub struct Env {
    pub now_us: u64,
    pub queue: Queue<Event>,
    pub random: Random,
    pub network: Network,
    pub catalog: SimCatalog,
    pub judge: Judge,
    pub trace: Trace,
    pub consumers: Consumers,
    pub reports: Reports,
    pub plan: Plan,
    pub faults: BTreeMap<Fault, u64>,
    /// The life each broker is in; `None` while it is down.
    pub incarnation: Vec<Option<u32>>,
    /// 1 for a broker of usual speed.
    pub slow_factor: Vec<u64>,
    pub disk_factor: Vec<u64>,
    pub disk_is_full: Vec<bool>,
    /// The next commit group of a broker fails.
    pub next_group_fails: Vec<Option<Fault>>,
    /// A broker dies at its disk after so many commit groups.
    pub disk_crash: Vec<Option<(u64, DiskCrash)>>,
    /// Processes each broker has had.
    pub lives: Vec<u32>,
    /// Messages on the lane from one core of a broker to another.
    pub lane_load: BTreeMap<(usize, usize, usize), usize>,
    /// When the last message on a lane arrives.
    pub lane_ready_us: BTreeMap<(usize, usize, usize), u64>,
    /// Steps of each broker's wall clock so far, microseconds.
    pub wall_offset_us: Vec<i64>,
    /// False once the run heals.
    pub may_inject: bool,
    /// A disk event asked for a crash of this broker.
    pub crash_wanted: Option<usize>,
}

impl Env {
    pub fn count_fault(&mut self, fault: Fault) {
        *self.faults.entry(fault).or_default() += 1;
    }

    /// Hands a core an input after a while.
    pub fn to_core(&mut self, after_us: u64, at: CoreAt, input: CoreInput) {
        self.queue
            .push(self.now_us + after_us, Event::Core { at, input });
    }

    /// A broker's wall clock, microseconds since 1970.
    pub fn wall_us(&self, node: usize) -> u64 {
        const START_US: u64 = 1_700_000_000_000_000;
        (START_US + self.now_us).saturating_add_signed(self.wall_offset_us[node])
    }

    pub fn note(&self, line: impl FnOnce() -> String) {
        self.trace.note(self.now_us, line);
    }
}
