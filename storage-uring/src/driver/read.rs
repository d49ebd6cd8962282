//! Reads of older data: drives a `ReadWalk` with reads through the ring.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use bytes::Bytes;

use super::ring::{ReadOp, ReadSlot};
use super::Shared;
use crate::error::ReadError;
use crate::format::ALIGN;
use crate::machine::{LogRef, ReadBatch};
use crate::slab::Draft;
use crate::walk::{ReadWalk, WalkStep, WantedRead};

/// What a read of several extents may be longer than their distance: a block before and an extent behind.
const READ_AROUND_BYTES: u64 = 128 * 1024;

/// Counts a read for as long as it lives, also when its future is dropped.
struct Permit<'a>(&'a Rc<Shared>);

impl<'a> Permit<'a> {
    fn take(shared: &'a Rc<Shared>) -> Result<Self, ReadError> {
        let mut core = shared.core.borrow_mut();
        if core.active_reads >= core.max_reads() {
            return Err(ReadError::Overloaded);
        }
        core.active_reads += 1;
        Ok(Self(shared))
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.core.borrow_mut().active_reads -= 1;
    }
}

pub(super) async fn read(
    shared: &Rc<Shared>,
    log: LogRef,
    from: u64,
    max_bytes: usize,
) -> Result<ReadBatch, ReadError> {
    let Some(mut walk) = start(shared, log, from, max_bytes)? else {
        let batch = shared
            .core
            .borrow()
            .machine
            .read_recent(log, from, max_bytes);
        return Ok(batch.unwrap_or(ReadBatch {
            first_offset: from,
            records: Vec::new(),
            next_offset: from,
        }));
    };
    let _permit = Permit::take(shared)?;
    let mut input = None;
    loop {
        match walk.step(input.take())? {
            WalkStep::Done(batch) => return Ok(batch),
            WalkStep::Read(wanted) => {
                let bytes = fetch(shared, wanted).await?;
                input = Some((wanted, bytes));
            }
        }
    }
}

/// The walk for a read; none when memory has it or there is nothing to read.
fn start(
    shared: &Rc<Shared>,
    log: LogRef,
    from: u64,
    max_bytes: usize,
) -> Result<Option<ReadWalk>, ReadError> {
    let core = shared.core.borrow();
    let state = core.machine.log_state(log);
    if state.damage.is_some() {
        return Err(ReadError::LogDamaged);
    }
    if from < state.base {
        return Err(ReadError::Trimmed {
            offset: from,
            base: state.base,
        });
    }
    let tail = core.machine.durable_tail(log);
    let recent_from = state.recent.oldest_offset();
    if from >= tail || recent_from.is_some_and(|oldest| oldest <= from) {
        return Ok(None);
    }
    let reach = (max_bytes as u64)
        .min((core.max_transfer_bytes() as u64).saturating_sub(READ_AROUND_BYTES));
    if let Some(stretch) = state.index.stretch(from, tail, reach) {
        let walk = ReadWalk::of_stretch(state.id, from, max_bytes, &stretch);
        return Ok(Some(walk));
    }
    let Some(interval) = state.index.interval(from, tail) else {
        return Ok(None);
    };
    Ok(Some(ReadWalk::new(state.id, from, max_bytes, interval)))
}

/// Reads a stretch of a segment, in transfers the device takes.
async fn fetch(shared: &Rc<Shared>, wanted: WantedRead) -> Result<Bytes, ReadError> {
    let io = |error: std::io::Error| ReadError::Io(error.to_string());
    let total = usize::try_from(wanted.len)
        .map_err(|_| ReadError::Io("a read too large for memory".to_owned()))?;
    let (file, step, mut draft) = {
        let mut core = shared.core.borrow_mut();
        (
            core.read_file(wanted.core, wanted.segment).map_err(io)?,
            core.max_transfer_bytes(),
            core.read_buffer(total),
        )
    };
    let mut done = 0;
    while done < total {
        let len = step.min(total - done);
        let slot = Rc::new(RefCell::new(ReadSlot::default()));
        shared.core.borrow_mut().start_read(ReadOp {
            file: Rc::clone(&file),
            position: wanted.position + done as u64,
            draft,
            at: done,
            len,
            slot: Rc::clone(&slot),
        });
        let (back, result) = wait(&slot).await;
        draft = back;
        let read = result.map_err(io)?;
        done += read;
        if read == 0 || read % ALIGN != 0 {
            // The end of the file.
            break;
        }
    }
    Ok(Bytes::from_owner(draft.freeze().part(0, done)))
}

async fn wait(slot: &Rc<RefCell<ReadSlot>>) -> (Draft, std::io::Result<usize>) {
    poll_fn(|cx| {
        let mut slot = slot.borrow_mut();
        match slot.result.take() {
            Some(result) => Poll::Ready(result),
            None => {
                slot.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    })
    .await
}
