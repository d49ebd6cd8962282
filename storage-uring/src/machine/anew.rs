//! A log that recovery refused, given up and begun anew.
//!
//! Nothing of what it held can be trusted to be whole, so nothing of it is kept: its owner has the records
//! elsewhere and says from where on. The bytes stay where they are; a segment with damage in it is never given
//! back.
//!
//! Invariant INV-S8: the *place* that abandons a refused log and the restatement that makes good for events lost
//! in the damage are in one group. Recovery finds both, and the log is whole; or neither, and it is refused as
//! before.

use super::append::state_name_bytes;
use super::control::{Change, Control, Restated};
use super::logs::LogRef;
use super::CommitMachine;
use crate::error::AppendError;
use crate::format::body::CRC_BYTES;
use crate::format::extent::EXTENT_HEADER_BYTES;
use crate::machine::control::number_after;

impl CommitMachine {
    /// Queues what makes the refused log `log` begin anew, empty, at `base`. It keeps the highest generation
    /// that anything of it names as the accepted one.
    pub(super) fn begin_anew(
        &mut self,
        log: LogRef,
        base: u64,
        time_us: u64,
        now_us: u64,
    ) -> Result<(), AppendError> {
        let state = self.logs.get(log);
        let restated = Restated {
            base,
            tail: base,
            generation: state.generation,
            control: Control {
                accepted: state.accepted,
                commit: 0,
                changes: number_after(state.changes),
                history: Vec::new(),
            },
        };
        let content = restated.encode();
        let name = state_name_bytes(self, log);
        let len = 2 * (EXTENT_HEADER_BYTES + name) + content.len() + CRC_BYTES;
        self.check_queue(len)?;
        self.check_space_for_event(len)?;
        self.ensure_room_for_event(now_us, len);
        if let Some(open) = self.open.as_mut() {
            let (bytes, change) = (self.writer.tail(), Change::Place(base));
            open.push_change(bytes, &mut self.logs, log, time_us, change);
            open.push_state(bytes, &mut self.logs, log, time_us, &content);
            let state = self.logs.get_mut(log);
            state.restating = true;
            if let Some(pending) = open.lists.changes.last_mut() {
                pending.damage_before = state.damage.take();
            }
        }
        self.count_open();
        Ok(())
    }
}
