//! A log's history names the generation its records are written under before the first of them.
//!
//! A shard with followers is recorded by its leader machine, which opens only then. One without has no
//! opening: the record of its generation goes into the core log right before its first write, so that no
//! write can be durable without it (I14).

use storage_uring::{ControlEvent, LogRef};

use crate::ids::Generation;

use super::append::AppendWaiter;
use super::Core;

/// Why a log may not be written to at a generation.
#[derive(Debug)]
pub(super) enum NotBegun {
    /// A newer generation was accepted here, or another broker led at this one.
    Fenced(String),
    Storage(storage_uring::AppendError),
}

/// The generation each log of a core has been begun at, by the log's number.
#[derive(Debug, Default)]
pub(super) struct Begun(Vec<Option<Generation>>);

impl Begun {
    fn is(&self, log: LogRef, generation: Generation) -> bool {
        self.0.get(log.index()) == Some(&Some(generation))
    }

    fn set(&mut self, log: LogRef, generation: Option<Generation>) {
        let at = log.index();
        if self.0.len() <= at {
            self.0.resize(at + 1, None);
        }
        self.0[at] = generation;
    }
}

impl Core {
    /// Sees to it that what is appended next to `log` lies behind the record of its generation.
    pub(super) fn begin_generation(
        &mut self,
        log: LogRef,
        generation: Generation,
    ) -> Result<(), NotBegun> {
        if self.begun.is(log, generation) {
            return Ok(());
        }
        let state = self.storage.state(log);
        let newest = state.history.last();
        let is_recorded = match newest {
            Some(entry) if entry.generation == generation.0 => {
                if *entry.leader != *self.me.as_str() {
                    let leader = &entry.leader;
                    let why = format!("generation {generation} was led by {leader}");
                    return Err(NotBegun::Fenced(why));
                }
                true
            }
            Some(_) | None => false,
        };
        let accepted = newest
            .map_or(0, |entry| entry.generation)
            .max(state.accepted);
        if accepted > generation.0 {
            let why = format!("generation {accepted} was accepted here already");
            return Err(NotBegun::Fenced(why));
        }
        if !is_recorded {
            let waiter = AppendWaiter::Begun { log, generation };
            let token = self.appends.insert(waiter);
            let event = ControlEvent::Begin {
                generation: generation.0,
                leader: self.me.as_str(),
            };
            if let Err(error) = self.storage.control(log, event, self.wall_us, token) {
                self.appends.remove(token);
                return Err(NotBegun::Storage(error));
            }
        }
        self.begun.set(log, Some(generation));
        Ok(())
    }

    /// A generation's record is durable, or was not written.
    pub(super) fn on_begun(&mut self, log: LogRef, generation: Generation, is_durable: bool) {
        match (is_durable, self.log_shards.get(&log)) {
            (true, Some(shard)) => self.state.note_accepted(shard, generation),
            (true, None) => {}
            (false, _) if self.begun.is(log, generation) => self.begun.set(log, None),
            (false, _) => {}
        }
    }
}
