//! What a follower's answer does to its cursor: the table of answers, one row a function.

use super::cursor::{AskId, Cursor, Halt, LogView, Pause, PauseCause, Sent};
use super::halt::HaltReason;
use super::limits::ShipLimits;
use crate::proto::outcome::PeerCode;
use crate::proto::MonoTime;

/// What a request came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Answered {
    /// The follower's durable offset.
    Ok { durable: u64 },
    Refused {
        code: PeerCode,
        /// Binding with `LogGap`.
        expected: u64,
    },
    /// Not a byte of it left.
    NotSent,
    /// Sent, and no answer is coming; it may have been taken.
    Unknown,
}

/// What the shard has to know of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct News {
    /// The follower refuses older leaders from now on.
    pub is_fencing: bool,
    pub moved: bool,
    /// A newer generation exists.
    pub superseded: bool,
    pub halted: Option<HaltReason>,
    pub paused: Option<PauseCause>,
    pub rebuild: Option<RebuildNews>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RebuildNews {
    /// The follower has discarded its copy.
    Started,
    Refused,
    /// The new copy is level.
    Completed,
    /// The follower went away while its copy was being made; the slot is free for another.
    Interrupted,
}

/// What an answer is held against.
pub(super) struct Setting<'a> {
    pub log: &'a LogView,
    pub limits: &'a ShipLimits,
    pub now: MonoTime,
    pub random: &'a mut u64,
}

impl Cursor {
    /// Takes the answer to one request.
    pub(super) fn on_answer(&mut self, id: AskId, answer: Answered, at: &mut Setting<'_>) -> News {
        let mut news = News::default();
        if let Answered::Refused {
            code: PeerCode::FencedEpoch,
            ..
        } = answer
        {
            // Honoured whatever it answers: nothing makes a newer generation go away.
            news.superseded = true;
            self.halt_for(HaltReason::Fenced, at, &mut news);
            return news;
        }
        let place = self.window.iter().position(|(sent, _)| *sent == id);
        let Some((_, sent)) = place.and_then(|place| self.window.remove(place)) else {
            return news;
        };
        if let Sent::Records { bytes, .. } = sent {
            self.window_bytes -= bytes;
        }
        if let Sent::Base { base } = sent {
            if self.base_is_refused(base, answer) {
                return news;
            }
        }
        match answer {
            Answered::Ok { durable } => self.on_ok(sent, durable, at, &mut news),
            Answered::Refused { code, expected } => {
                // The window first: it still knows the lowest place.
                self.window.push_front((id, sent));
                self.discard();
                self.on_refused(sent, code, expected, at, &mut news);
            }
            Answered::NotSent | Answered::Unknown => {
                self.window.push_front((id, sent));
                self.discard();
                self.on_lost(sent, at, &mut news);
            }
        }
        news
    }

    /// Whether a follower that was told where the log begins refuses that, which is no fault. One that holds
    /// records from elsewhere says so and changes nothing at that; some do not know the message. Any other is
    /// told again, unless it has heard it.
    fn base_is_refused(&mut self, base: u64, answer: Answered) -> bool {
        let is_refused = match answer {
            Answered::Refused { code, .. } => matches!(
                code,
                PeerCode::LogConflict | PeerCode::Malformed | PeerCode::UnsupportedKind
            ),
            Answered::Ok { .. } | Answered::NotSent | Answered::Unknown => false,
        };
        let is_heard = is_refused || matches!(answer, Answered::Ok { .. });
        if !is_heard && self.told_base == base {
            self.told_base = 0;
        }
        is_refused
    }

    fn on_ok(&mut self, sent: Sent, durable: u64, at: &mut Setting<'_>, news: &mut News) {
        self.is_started = true;
        self.is_known_to_take_it = true;
        self.forget_faults();
        news.is_fencing = true;
        // Never more than the leader holds itself.
        let durable = durable.min(at.log.synced);
        let before = self.position;
        match sent {
            Sent::Probe { at: probed } => {
                self.next = durable;
                self.position = before.max(Some(durable));
                // Asked at the base itself, it has said that it ends below.
                self.must_offer |= probed == at.log.base && durable < probed;
            }
            Sent::Records { end, .. } => {
                self.position = before.max(Some(durable));
                if durable >= end {
                    self.next = self.next.max(durable);
                } else if self.window.is_empty() && self.fetching.is_none() {
                    self.next = durable;
                    let wait = self.stale.next(at.limits.stale_base, at.limits.stale_max);
                    self.pause_for(PauseCause::Behind, wait, at.now, news);
                }
            }
            // It begins there by now; how far it is, others say.
            Sent::Base { .. } => {}
            Sent::Bootstrap => {
                self.must_offer = false;
                self.next = durable;
                self.position = before.max(Some(durable));
            }
            Sent::Rebuild => {
                self.halt = None;
                self.must_offer = false;
                self.next = durable;
                // What it had answered before, it has thrown away.
                self.position = Some(durable);
                news.rebuild = Some(RebuildNews::Started);
            }
        }
        news.moved = self.position != before;
        self.finish_rebuild_when_level(at.log, news);
    }

    pub(super) fn finish_rebuild_when_level(&mut self, log: &LogView, news: &mut News) {
        let is_level = self.position.is_some_and(|position| position >= log.synced);
        if self.holds_slot && self.halt.is_none() && is_level && news.rebuild.is_none() {
            self.refused_rebuilds.reset();
            news.rebuild = Some(RebuildNews::Completed);
        }
    }

    fn on_refused(
        &mut self,
        sent: Sent,
        code: PeerCode,
        expected: u64,
        at: &mut Setting<'_>,
        news: &mut News,
    ) {
        if sent == Sent::Rebuild {
            return self.on_rebuild_refused(code, at, news);
        }
        match code {
            PeerCode::LogGap => self.on_gap(sent, expected, at, news),
            PeerCode::LogConflict => {
                let reason = match sent {
                    Sent::Bootstrap => HaltReason::NeedsBootstrap,
                    Sent::Probe { .. }
                    | Sent::Records { .. }
                    | Sent::Base { .. }
                    | Sent::Rebuild => HaltReason::Diverged,
                };
                self.halt_for(reason, at, news);
            }
            PeerCode::StaleRoute => {
                let wait = match at.log.is_probing {
                    true => self.stale.next(at.limits.probe_base, at.limits.probe_max),
                    false => self.stale.next(at.limits.stale_base, at.limits.stale_max),
                };
                self.pause_for(PauseCause::StaleRoute, wait, at.now, news);
            }
            PeerCode::Unavailable => self.pause_passing(PauseCause::Unavailable, at, news),
            PeerCode::Overload => self.pause_passing(PauseCause::Overload, at, news),
            PeerCode::Unauthorized => self.halt_for(HaltReason::Unauthorized, at, news),
            PeerCode::Malformed => self.on_damaged(sent, at, news),
            PeerCode::UnsupportedKind | PeerCode::ProtocolVersion => {
                self.halt_for(HaltReason::Unsupported, at, news);
            }
            PeerCode::StorageFailed => {
                let wait = self
                    .failed
                    .next(at.limits.failed_base, at.limits.failed_max);
                self.pause_for(PauseCause::StorageFailed, wait, at.now, news);
                news.halted = Some(HaltReason::Storage);
            }
            PeerCode::FencedEpoch => {}
        }
    }

    fn on_gap(&mut self, sent: Sent, expected: u64, at: &mut Setting<'_>, news: &mut News) {
        self.is_known_to_take_it = true;
        self.is_started = true;
        news.is_fencing = true;
        self.damaged = 0;
        // It does not hold what it is asking for, whatever it said before.
        if self.position.is_some_and(|position| position > expected) {
            self.position = Some(expected);
            news.moved = true;
        }
        // Nothing it holds was compared with this log, and its head was somebody else's, or was given up for
        // records that this log lacks. Shipping on from where it asks would leave a hole that nobody can see.
        let is_anothers = self.position.is_none() && expected > at.log.heads_end;
        // It asks for a record to compare, and there is none: it is told where the log begins.
        let has_nothing = match sent {
            Sent::Probe { at: probed } => probed == expected && expected >= at.log.synced,
            Sent::Records { .. } | Sent::Bootstrap | Sent::Base { .. } | Sent::Rebuild => false,
        };
        let is_progress = self.gaps == 0 || expected < self.last_gap;
        self.gaps = if is_progress { 1 } else { self.gaps + 1 };
        self.last_gap = expected;
        if expected < at.log.base || expected > at.log.synced || is_anothers || has_nothing {
            self.must_offer = true;
        } else {
            self.must_offer = false;
            self.next = expected;
        }
        if self.gaps >= at.limits.patience {
            self.gaps = 0;
            self.pause_passing(PauseCause::GapLoop, at, news);
        }
    }

    fn on_damaged(&mut self, sent: Sent, at: &mut Setting<'_>, news: &mut News) {
        if matches!(sent, Sent::Probe { .. }) && !self.probe_refused {
            // Some followers do not take a batch without records; one with records says the same.
            self.probe_refused = true;
            return;
        }
        self.damaged += 1;
        if self.damaged <= at.limits.patience {
            return;
        }
        self.damaged = 0;
        if self.is_known_to_take_it {
            self.pause_passing(PauseCause::Damaged, at, news);
        } else {
            // Older peers say so of a kind they do not know.
            self.halt_for(HaltReason::Unsupported, at, news);
        }
    }

    fn on_lost(&mut self, sent: Sent, at: &mut Setting<'_>, news: &mut News) {
        if sent == Sent::Rebuild {
            return self.put_off_rebuild(at, news);
        }
        self.pause_passing(PauseCause::Unreachable, at, news);
        if self.holds_slot {
            news.rebuild = Some(RebuildNews::Interrupted);
        }
    }

    fn on_rebuild_refused(&mut self, code: PeerCode, at: &mut Setting<'_>, news: &mut News) {
        match code {
            PeerCode::UnsupportedKind | PeerCode::ProtocolVersion => {
                // It cannot be told to; the halt stays for an operator.
                if let Some(halt) = &mut self.halt {
                    halt.is_asked = false;
                    halt.rebuild_at = MonoTime::from_micros(u64::MAX);
                }
                news.rebuild = Some(RebuildNews::Refused);
            }
            PeerCode::Unauthorized => {
                news.rebuild = Some(RebuildNews::Refused);
                self.halt_for(HaltReason::Unauthorized, at, news);
            }
            PeerCode::StaleRoute
            | PeerCode::Unavailable
            | PeerCode::Overload
            | PeerCode::Malformed
            | PeerCode::StorageFailed
            | PeerCode::LogGap
            | PeerCode::LogConflict
            | PeerCode::FencedEpoch => self.put_off_rebuild(at, news),
        }
    }

    fn put_off_rebuild(&mut self, at: &mut Setting<'_>, news: &mut News) {
        let wait = self
            .refused_rebuilds
            .next(at.limits.failed_base, at.limits.failed_max);
        if let Some(halt) = &mut self.halt {
            halt.is_asked = false;
            halt.rebuild_at = at.now + wait;
        }
        news.rebuild = Some(RebuildNews::Refused);
    }

    pub(super) fn halt_for(&mut self, reason: HaltReason, at: &mut Setting<'_>, news: &mut News) {
        self.discard();
        self.pause = None;
        self.must_offer = false;
        news.moved |= self.position.is_some();
        news.halted = Some(reason);
        if self.holds_slot && news.rebuild.is_none() {
            // A copy that diverges again while it is made: the next attempt is a new one.
            news.rebuild = Some(RebuildNews::Refused);
        }
        let wait = match self.holds_slot {
            true => self
                .refused_rebuilds
                .next(at.limits.failed_base, at.limits.failed_max),
            false => std::time::Duration::ZERO,
        };
        self.halt = Some(Halt {
            reason,
            rebuild_at: at.now + wait,
            is_asked: false,
        });
    }

    fn pause_passing(&mut self, cause: PauseCause, at: &mut Setting<'_>, news: &mut News) {
        let limits = at.limits;
        let wait = match at.log.is_probing {
            true => self.passing.next(limits.probe_base, limits.probe_max),
            false => self
                .passing
                .next_jittered(limits.passing_base, limits.passing_max, at.random),
        };
        self.pause_for(cause, wait, at.now, news);
    }

    fn pause_for(
        &mut self,
        cause: PauseCause,
        wait: std::time::Duration,
        now: MonoTime,
        news: &mut News,
    ) {
        self.pause = Some(Pause {
            until: now + wait,
            cause,
        });
        news.paused = Some(cause);
    }

    fn forget_faults(&mut self) {
        self.gaps = 0;
        self.damaged = 0;
        self.stale.reset();
        self.passing.reset();
        self.failed.reset();
    }
}
