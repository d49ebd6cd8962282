//! Faults on purpose: lets tests of the whole broker make a device misbehave.
//!
//! Applied by the driver where it talks to the kernel; costs one check when there is no plan.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Which operation a fault is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultOp {
    /// Writes of commit groups.
    Write,
    /// Flushes; with O_DSYNC these are the writes of commit groups.
    Flush,
    /// Reads of older data.
    Read,
    /// Syncs of files that are made into segments.
    SyncSpare,
    /// Syncs of the directory of a core's log.
    SyncDirectory,
    /// Syncs of rewritten segments, before they take their place.
    SyncRewritten,
}

/// Number of kinds of operations.
const KINDS: usize = 6;

/// What happens instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultEffect {
    /// The operation is not carried out and answers this error number.
    Error(i32),
    /// Only this many bytes are stored; 0 stores nothing.
    Short(usize),
    /// The answer comes later by this many milliseconds.
    DelayMs(u64),
}

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultRule {
    /// The operation.
    pub op: FaultOp,
    /// First operation of this kind it applies to, counted from 1.
    pub nth: u64,
    /// How many operations it applies to.
    pub count: u64,
    /// What happens.
    pub effect: FaultEffect,
}

/// Faults to inject.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultPlan {
    /// Rules; the first that matches applies.
    pub rules: Vec<FaultRule>,
}

/// A plan with its counters.
#[derive(Debug, Default)]
pub struct FaultState {
    plan: FaultPlan,
    /// Operations so far, by kind.
    counts: [u64; KINDS],
}

impl FaultState {
    /// Starts counting.
    pub fn new(plan: FaultPlan) -> Self {
        Self {
            plan,
            ..Self::default()
        }
    }

    /// The fault of the next operation of this kind. `syncs` says that a write is a flush, too.
    pub fn next(&mut self, op: FaultOp, syncs: bool) -> Option<FaultEffect> {
        let is_flush = op == FaultOp::Write && syncs;
        self.counts[op as usize] += 1;
        self.counts[FaultOp::Flush as usize] += u64::from(is_flush);
        let matches = |rule: &&FaultRule| {
            let is_meant = rule.op == op || (rule.op == FaultOp::Flush && is_flush);
            let until = rule.nth.saturating_add(rule.count);
            is_meant && (rule.nth..until).contains(&self.counts[rule.op as usize])
        };
        self.plan.rules.iter().find(matches).map(|rule| rule.effect)
    }

    /// The error the next operation of this kind ends with, if a rule says so; delays are waited for.
    pub fn error_of_next(&mut self, op: FaultOp) -> std::io::Result<()> {
        match self.next(op, false) {
            Some(FaultEffect::Error(errno)) => Err(std::io::Error::from_raw_os_error(errno)),
            Some(FaultEffect::DelayMs(ms)) => {
                std::thread::sleep(Duration::from_millis(ms));
                Ok(())
            }
            Some(FaultEffect::Short(_)) | None => Ok(()),
        }
    }
}

impl FaultEffect {
    /// The delay, if that is what it is.
    pub fn delay(self) -> Option<Duration> {
        match self {
            Self::DelayMs(ms) => Some(Duration::from_millis(ms)),
            Self::Error(_) | Self::Short(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_count_their_own_operations() {
        let rule = |op, nth, count, effect| FaultRule {
            op,
            nth,
            count,
            effect,
        };
        let plan = FaultPlan {
            rules: vec![
                rule(FaultOp::Write, 2, 1, FaultEffect::Short(0)),
                rule(FaultOp::Flush, 3, 2, FaultEffect::Error(5)),
            ],
        };
        let mut state = FaultState::new(plan);
        assert_eq!(state.next(FaultOp::Write, true), None);
        assert_eq!(state.next(FaultOp::Read, true), None);
        assert_eq!(
            state.next(FaultOp::Write, true),
            Some(FaultEffect::Short(0))
        );
        assert_eq!(
            state.next(FaultOp::Write, true),
            Some(FaultEffect::Error(5))
        );
        assert_eq!(
            state.next(FaultOp::Write, true),
            Some(FaultEffect::Error(5))
        );
        assert_eq!(state.next(FaultOp::Write, true), None);
    }
}
