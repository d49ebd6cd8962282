//! One follower's place in one log: what it is asked next.
//!
//! What an answer does to it is in [`answers`](super::answers).
//!
//! A cursor starts with a batch without records at the place where the leader's own generation
//! begins, less one: the answer says how far the follower is matched, so that a follower that is
//! level costs one small exchange whatever the log's length, and one that is not is compared from
//! the boundary on. Then batches follow each other on one ordered stream, several at a time.
//! Anything but `ReplicateOk` throws the whole window away, and what was in it is asked again:
//! positions resolve what had arrived after all.

use std::collections::VecDeque;

use super::halt::HaltReason;
use super::limits::ShipLimits;
use super::pace::Doubling;
use crate::ids::Offset;
use crate::proto::MonoTime;

/// Names one request of one cursor; grows with each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct AskId(pub u64);

/// What a follower is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ask {
    /// A batch without records, at this offset.
    Probe { at: Offset },
    /// Read records from here on, report them with `on_fetched`, and send them.
    Fetch {
        from: Offset,
        max_bytes: u32,
        max_records: u32,
    },
    /// Where the leader's log begins: one that holds nothing places its copy there.
    Bootstrap { base: Offset },
    /// Discard the copy and begin here.
    Rebuild { base: Offset },
}

/// A request to carry out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Asked {
    pub id: AskId,
    pub ask: Ask,
}

/// What a fetch came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fetched {
    /// Records from the asked offset to `end`, at least one.
    Records { end: Offset, bytes: u64 },
    /// The offset is below what the leader keeps.
    Trimmed,
    /// The leader's own log cannot be read now.
    Failed,
}

/// The leader's log as a cursor has to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogView {
    pub base: u64,
    /// One past the last synced record; nothing above it is shipped.
    pub synced: u64,
    /// On the main log of a `Quorum` shard: one past what is known committed. A copy may not be
    /// placed above it: its answer would move the mark over records nobody holds.
    pub committed: Option<u64>,
    /// Where a copy may begin at most of which nothing was compared with this log. What stands for the head
    /// of one that begins higher, this log may never have had.
    pub heads_end: u64,
    /// The shard is not open yet: failed probes are repeated at their own pace.
    pub is_probing: bool,
    /// Where a follower must have come to before it is told of the base, of a log whose base followers
    /// take over: everything that says what the records below it said.
    pub restated: Option<u64>,
}

impl LogView {
    pub(super) fn may_place(&self) -> bool {
        self.committed
            .is_none_or(|committed| self.base <= committed)
    }
}

/// Why a cursor waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PauseCause {
    /// The follower has not seen this generation yet.
    StaleRoute,
    Unavailable,
    Overload,
    /// Nothing was sent, or no answer came.
    Unreachable,
    /// Its disk failed; it is asked again now and then.
    StorageFailed,
    /// It asks for the same place again and again.
    GapLoop,
    /// It finds every copy of a batch damaged.
    Damaged,
    /// It answers less than it was sent.
    Behind,
    /// The leader's own log could not be read.
    OwnRead,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Pause {
    pub until: MonoTime,
    pub cause: PauseCause,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Halt {
    pub reason: HaltReason,
    /// When a rebuild may be asked for.
    pub rebuild_at: MonoTime,
    /// One is on its way.
    pub is_asked: bool,
}

/// What is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    Probe {
        at: u64,
    },
    Records {
        first: u64,
        end: u64,
        bytes: u64,
    },
    Bootstrap,
    /// Where the log begins by now, to a follower that holds more; nothing depends on its answer.
    Base {
        base: u64,
    },
    Rebuild,
}

/// Where a cursor stands, for listings and tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CursorPhase {
    /// No answer at this generation yet.
    Start,
    Shipping,
    Paused(PauseCause),
    /// The follower has to be told where the leader's log begins.
    Offering,
    Halted(HaltReason),
    /// A new copy is on its way.
    Rebuilding,
}

/// One follower's place in one log, at one generation.
#[derive(Debug)]
pub struct Cursor {
    /// The next offset to fetch; a guess until the first answer.
    pub(super) next: u64,
    /// The highest offset answered at this generation.
    pub(super) position: Option<u64>,
    /// The first answer that says where the follower is has come.
    pub(super) is_started: bool,
    /// The follower does not take a batch without records.
    pub(super) probe_refused: bool,
    pub(super) must_offer: bool,
    pub(super) window: VecDeque<(AskId, Sent)>,
    pub(super) window_bytes: u64,
    pub(super) fetching: Option<(AskId, u64)>,
    pub(super) next_id: u64,
    pub(super) pause: Option<Pause>,
    pub(super) halt: Option<Halt>,
    pub(super) holds_slot: bool,
    /// The base it was told of at this generation.
    pub(super) told_base: u64,
    /// The follower has accepted something of this log on this connection.
    pub(super) is_known_to_take_it: bool,
    pub(super) gaps: u32,
    pub(super) last_gap: u64,
    pub(super) damaged: u32,
    pub(super) stale: Doubling,
    pub(super) passing: Doubling,
    pub(super) failed: Doubling,
    pub(super) refused_rebuilds: Doubling,
}

/// What a cursor wants now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    Nothing,
    Probe {
        at: u64,
    },
    Fetch {
        from: u64,
    },
    Bootstrap,
    /// Tell it where the log begins by now.
    Base,
    Rebuild,
}

impl Cursor {
    /// A cursor of a new generation. `start` is where comparison begins; it counts as nothing.
    pub fn new(start: u64) -> Self {
        Self {
            next: start,
            position: None,
            is_started: false,
            probe_refused: false,
            must_offer: false,
            window: VecDeque::new(),
            window_bytes: 0,
            fetching: None,
            next_id: 0,
            pause: None,
            halt: None,
            holds_slot: false,
            told_base: 0,
            is_known_to_take_it: false,
            gaps: 0,
            last_gap: 0,
            damaged: 0,
            stale: Doubling::default(),
            passing: Doubling::default(),
            failed: Doubling::default(),
            refused_rebuilds: Doubling::default(),
        }
    }

    /// What counts for the mark: the position, unless the follower is halted.
    pub fn counted(&self) -> Option<u64> {
        self.position.filter(|_| self.halt.is_none())
    }

    /// The highest offset answered at this generation, halted or not.
    pub fn position(&self) -> Option<u64> {
        self.position
    }

    /// Whether it is to go on from where it is, though it may have to wait.
    pub(super) fn is_shipped_to(&self) -> bool {
        self.halt.is_none()
    }

    /// Why nothing is shipped, when an operator has to know.
    pub fn halted(&self) -> Option<HaltReason> {
        let paused = self
            .pause
            .filter(|pause| pause.cause == PauseCause::StorageFailed)
            .map(|_| HaltReason::Storage);
        self.halt.map(|halt| halt.reason).or(paused)
    }

    /// Why the copy has to be made anew, or is being made anew: until it is level it is nothing to lead with.
    pub fn made_anew(&self) -> Option<HaltReason> {
        let halted = self.halt.map(|halt| halt.reason);
        let halted = halted.filter(|reason| reason.is_rebuildable());
        halted.or(self.holds_slot.then_some(HaltReason::NeedsBootstrap))
    }

    /// Where the cursor stands.
    pub fn phase(&self) -> CursorPhase {
        if let Some(halt) = self.halt {
            return CursorPhase::Halted(halt.reason);
        }
        if let Some(pause) = self.pause {
            return CursorPhase::Paused(pause.cause);
        }
        if self.holds_slot {
            return CursorPhase::Rebuilding;
        }
        match (self.must_offer, self.is_started) {
            (true, _) => CursorPhase::Offering,
            (false, false) => CursorPhase::Start,
            (false, true) => CursorPhase::Shipping,
        }
    }

    /// Requests on their way.
    pub fn in_flight(&self) -> usize {
        self.window.len() + usize::from(self.fetching.is_some())
    }

    /// When [`Self::on_time`] has something to do.
    pub fn next_deadline(&self) -> Option<MonoTime> {
        if let Some(halt) = self.halt {
            return (halt.reason.is_rebuildable() && !halt.is_asked).then_some(halt.rebuild_at);
        }
        self.pause.map(|pause| pause.until)
    }

    /// Time passed.
    pub fn on_time(&mut self, now: MonoTime) {
        if self.pause.is_some_and(|pause| pause.until <= now) {
            self.pause = None;
        }
    }

    /// What it wants at `now`.
    pub(super) fn want(&self, log: &LogView, limits: &ShipLimits, now: MonoTime) -> Want {
        if let Some(halt) = self.halt {
            let may = halt.reason.is_rebuildable()
                && !halt.is_asked
                && now >= halt.rebuild_at
                && log.may_place();
            return if may { Want::Rebuild } else { Want::Nothing };
        }
        if self.pause.is_some_and(|pause| now < pause.until) || self.fetching.is_some() {
            return Want::Nothing;
        }
        let is_alone = self.window.is_empty();
        let is_below = self.is_started && self.next < log.base;
        if is_below && !self.must_offer && !self.probe_refused && log.restated.is_some() {
            // It may hold more than it has said, and an offer of the base would have it give up what it cannot
            // do without yet: it is asked how far it is.
            return match is_alone {
                true => Want::Probe { at: log.base },
                false => Want::Nothing,
            };
        }
        if self.must_offer || is_below {
            let may = is_alone && log.may_place();
            return if may { Want::Bootstrap } else { Want::Nothing };
        }
        if !self.is_started && !self.probe_refused {
            return match is_alone {
                true => Want::Probe { at: self.next },
                false => Want::Nothing,
            };
        }
        if !is_alone && !self.has_room(limits) {
            return Want::Nothing;
        }
        if self.is_owed_the_base(log) {
            return Want::Base;
        }
        if self.next < log.synced {
            return Want::Fetch { from: self.next };
        }
        match self.position {
            // It has said where to go on, and not yet that it holds what is below.
            None if is_alone && self.probe_refused && log.synced > log.base => Want::Fetch {
                from: log.synced - 1,
            },
            None if is_alone && !self.probe_refused => Want::Probe { at: self.next },
            None | Some(_) => Want::Nothing,
        }
    }

    /// Whether the follower, which holds all that stands for what was given up, is to be told.
    fn is_owed_the_base(&self, log: &LogView) -> bool {
        let holds_all = log.restated.is_some_and(|end| self.position >= Some(end));
        self.told_base < log.base && holds_all && log.may_place()
    }

    fn has_room(&self, limits: &ShipLimits) -> bool {
        // Before the first answer one exchange at a time: all behind it would be thrown away.
        let batches = if self.is_started {
            limits.window_batches
        } else {
            1
        };
        self.window.len() < batches && self.window_bytes < limits.window_bytes
    }

    /// Takes up what [`Self::want`] said.
    pub(super) fn ask(&mut self, want: Want, log: &LogView, limits: &ShipLimits) -> Option<Asked> {
        let (ask, sent) = match want {
            Want::Nothing => return None,
            Want::Probe { at } => (Ask::Probe { at: Offset(at) }, Sent::Probe { at }),
            Want::Fetch { from } => {
                let id = self.take_id();
                self.next = from;
                self.fetching = Some((id, from));
                let ask = Ask::Fetch {
                    from: Offset(from),
                    max_bytes: limits.batch_bytes,
                    max_records: limits.batch_records,
                };
                return Some(Asked { id, ask });
            }
            Want::Bootstrap => {
                self.must_offer = true;
                self.told_base = log.base;
                let base = Offset(log.base);
                (Ask::Bootstrap { base }, Sent::Bootstrap)
            }
            Want::Base => {
                // Not again, unless it may not have heard it.
                self.told_base = log.base;
                let base = Offset(log.base);
                (Ask::Bootstrap { base }, Sent::Base { base: log.base })
            }
            Want::Rebuild => {
                if let Some(halt) = &mut self.halt {
                    halt.is_asked = true;
                }
                self.discard();
                self.told_base = log.base;
                let base = Offset(log.base);
                (Ask::Rebuild { base }, Sent::Rebuild)
            }
        };
        let id = self.take_id();
        self.window.push_back((id, sent));
        Some(Asked { id, ask })
    }

    /// A fetch is done. True: send the records under that id, now, behind everything sent before.
    pub fn on_fetched(
        &mut self,
        id: AskId,
        fetched: Fetched,
        limits: &ShipLimits,
        now: MonoTime,
        random: &mut u64,
    ) -> bool {
        let Some((_, first)) = self.fetching.take_if(|(expected, _)| *expected == id) else {
            return false;
        };
        match fetched {
            Fetched::Records { end, bytes } if end.0 > first => {
                self.next = end.0;
                self.window_bytes += bytes;
                let sent = Sent::Records {
                    first,
                    end: end.0,
                    bytes,
                };
                self.window.push_back((id, sent));
                true
            }
            Fetched::Trimmed => {
                // What is on its way ends below the leader's base; its answers say where it is.
                self.must_offer = true;
                false
            }
            Fetched::Records { .. } | Fetched::Failed => {
                let wait =
                    self.passing
                        .next_jittered(limits.passing_base, limits.passing_max, random);
                self.pause = Some(Pause {
                    until: now + wait,
                    cause: PauseCause::OwnRead,
                });
                false
            }
        }
    }

    /// Whether that fetch is on its way and was not given up.
    pub(super) fn awaits(&self, id: AskId) -> bool {
        self.fetching.is_some_and(|(awaited, _)| awaited == id)
    }

    /// How far the follower is has to be known before it is offered the base: see [`Self::want`]. One that
    /// takes no batch without records cannot be asked, and records to ask it with are gone.
    pub(super) fn ask_before_offer(&mut self) {
        if !self.probe_refused {
            (self.must_offer, self.is_started) = (false, false);
        }
    }

    /// The follower's connection has come up anew.
    pub fn on_peer_up(&mut self) {
        self.is_known_to_take_it = false;
        self.pause
            .take_if(|pause| pause.cause == PauseCause::Unreachable);
        let was_unsupported = self
            .halt
            .take_if(|halt| halt.reason == HaltReason::Unsupported);
        self.restart_if(was_unsupported.is_some());
    }

    /// The catalog was read again, and this shard's assignment is as before.
    pub fn on_view(&mut self) {
        self.pause
            .take_if(|pause| pause.cause == PauseCause::StaleRoute);
        let was_refused = self
            .halt
            .take_if(|halt| halt.reason == HaltReason::Unauthorized);
        self.restart_if(was_refused.is_some());
    }

    fn restart_if(&mut self, is_over: bool) {
        if is_over {
            self.is_started = false;
            self.probe_refused = false;
        }
    }

    fn take_id(&mut self) -> AskId {
        let id = AskId(self.next_id);
        self.next_id += 1;
        id
    }

    /// Throws the window away; the lowest offset that was in it is asked for again.
    pub(super) fn discard(&mut self) {
        let lowest = self.window.iter().filter_map(|(_, sent)| sent.first());
        let fetching = self.fetching.map(|(_, first)| first);
        if let Some(first) = lowest.chain(fetching).min() {
            self.next = self.next.min(first);
        }
        self.window.clear();
        self.window_bytes = 0;
        self.fetching = None;
    }
}

impl Sent {
    /// The first offset it is about, if any.
    pub(super) fn first(self) -> Option<u64> {
        match self {
            Self::Probe { at } => Some(at),
            Self::Records { first, .. } => Some(first),
            Self::Bootstrap | Self::Base { .. } | Self::Rebuild => None,
        }
    }
}
