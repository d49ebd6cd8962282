//! The relay owner's disk: group commit and nothing else.
//!
//! What arrives while earlier groups are on their way gathers into the next one; answers come in order
//! and only for what is durable. The same policy as the broker's storage, without records, logs, shards,
//! segments or recovery.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::task::{Context, Poll};

use glommio::io::BufferedFile;
use shard_executor::rt::{spawn_local, Task};
use shard_executor::Signal;

use crate::disk::{create_written_file, AlignedBuffer, WriteDone, WriteRing, ALIGN_BYTES};

struct Group<A> {
    buffer: AlignedBuffer,
    used: usize,
    owed: Vec<A>,
}

struct Flight<A> {
    tag: u64,
    owed: Vec<A>,
    is_durable: bool,
}

/// Writes what it is given and says when it is durable. `A` is whom to answer then.
pub struct Journal<A> {
    ring: WriteRing,
    file_bytes: u64,
    group_bytes: usize,
    at: u64,
    next_tag: u64,
    open: Group<A>,
    full: VecDeque<Group<A>>,
    flights: VecDeque<Flight<A>>,
    spare: Vec<AlignedBuffer>,
    bell: Signal,
    _watcher: Task<()>,
}

impl<A: 'static> Journal<A> {
    /// A journal over a pre-written file of `file_bytes`, begun again when it is full.
    pub fn open(
        path: &Path,
        file_bytes: u64,
        group_bytes: usize,
        in_flight: usize,
    ) -> io::Result<Self> {
        let file_bytes = file_bytes.max(group_bytes as u64 * 4);
        let ring = WriteRing::new(create_written_file(path, file_bytes)?, in_flight)?;
        let bell = Signal::new();
        let watcher = spawn_local(watch(ring.eventfd()?, bell.clone()));
        Ok(Self {
            ring,
            file_bytes,
            group_bytes,
            at: 0,
            next_tag: 0,
            open: Group {
                buffer: AlignedBuffer::new(group_bytes),
                used: 0,
                owed: Vec::new(),
            },
            full: VecDeque::new(),
            flights: VecDeque::new(),
            spare: Vec::new(),
            bell,
            _watcher: watcher,
        })
    }

    /// Copies bytes into the open group, and into further ones as it fills.
    pub fn append(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = self.group_bytes - self.open.used;
            if room == 0 {
                self.close_group();
                continue;
            }
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            let used = self.open.used;
            self.open.buffer.bytes_mut()[used..used + now.len()].copy_from_slice(now);
            self.open.used += now.len();
            bytes = later;
        }
    }

    /// Owes an answer for everything appended so far.
    pub fn owe(&mut self, answer: A) {
        self.open.owed.push(answer);
    }

    fn close_group(&mut self) {
        let buffer = self
            .spare
            .pop()
            .unwrap_or_else(|| AlignedBuffer::new(self.group_bytes));
        let next = Group {
            buffer,
            used: 0,
            owed: Vec::new(),
        };
        self.full.push_back(std::mem::replace(&mut self.open, next));
    }

    /// Starts groups while there is room on the way to the disk.
    pub fn kick(&mut self) -> io::Result<()> {
        while self.ring.has_room() {
            if self.full.is_empty() {
                if self.open.used == 0 {
                    break;
                }
                self.close_group();
            }
            let Some(group) = self.full.pop_front() else {
                break;
            };
            let len = group.used.next_multiple_of(ALIGN_BYTES);
            if self.at + len as u64 > self.file_bytes {
                self.at = 0;
            }
            self.ring.start(self.next_tag, group.buffer, len, self.at)?;
            self.at += len as u64;
            self.flights.push_back(Flight {
                tag: self.next_tag,
                owed: group.owed,
                is_durable: false,
            });
            self.next_tag += 1;
        }
        Ok(())
    }

    /// Gives the answers that may go out now, in order.
    pub fn take_durable(&mut self, mut each: impl FnMut(A)) -> io::Result<()> {
        self.bell.take();
        let mut failed = None;
        let (flights, spare) = (&mut self.flights, &mut self.spare);
        self.ring.reap(
            |WriteDone {
                 tag,
                 buffer,
                 result,
             }| {
                failed = result.err();
                spare.push(buffer);
                if let Some(flight) = flights.iter_mut().find(|f| f.tag == tag) {
                    flight.is_durable = true;
                }
            },
        );
        if let Some(error) = failed {
            return Err(error);
        }
        while self.flights.front().is_some_and(|f| f.is_durable) {
            if let Some(flight) = self.flights.pop_front() {
                flight.owed.into_iter().for_each(&mut each);
            }
        }
        Ok(())
    }

    /// Whether a write finished whose answers were not taken; costs no system call.
    pub fn has_finished(&self) -> bool {
        self.ring.has_finished()
    }

    /// Ready when a write finished.
    pub fn poll_ready(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.bell.poll_wait(cx)
    }
}

/// Rings the bell of this core whenever the ring's descriptor becomes readable.
async fn watch(eventfd: OwnedFd, bell: Signal) {
    // SAFETY: the descriptor is owned and passes to the file.
    let file = unsafe { BufferedFile::from_raw_fd(eventfd.into_raw_fd()) };
    while file.read_at(0, 8).await.is_ok() {
        bell.set();
    }
}
