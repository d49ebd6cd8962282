//! What reads of older data need besides the ring: open files and memory.

use std::collections::VecDeque;
use std::fs::File;
use std::rc::Rc;

use crate::datadir::Layout;
use crate::recovery::open_for_reading;
use crate::slab::{Draft, SlabPool, SlabWriter};

/// Size of a pooled buffer, a huge page: a read into small pages costs the disk driver an entry for each of
/// them, and a disk of a virtual machine a third of its rate. Two of the largest transfers fit one.
const BUFFER_BYTES: usize = 2 << 20;
/// How many idle ones are kept.
const BUFFERS: usize = 4;
/// Shorter reads get memory of their own: they would keep a whole buffer for as long as a reader has them.
const POOLED_BYTES_MIN: usize = 64 << 10;
/// Files kept open.
const FILES: usize = 64;

/// Files and buffers of one core's reads.
pub(super) struct Reading {
    files: VecDeque<((u16, u64), Rc<File>)>,
    /// Used again once nobody holds a record of them.
    buffers: SlabPool,
    /// The buffer that reads are given parts of.
    writer: SlabWriter,
}

impl Reading {
    pub fn new() -> Self {
        Self {
            files: VecDeque::new(),
            buffers: SlabPool::new(BUFFER_BYTES, BUFFERS),
            // As good as full: a core that never reads has no buffer.
            writer: SlabWriter::new(0),
        }
    }

    /// A segment of any core, open for reading.
    pub fn file(&mut self, layout: &Layout, core: u16, segment: u64) -> std::io::Result<Rc<File>> {
        let key = (core, segment);
        if let Some(at) = self.files.iter().position(|(held, _)| *held == key) {
            if let Some(entry) = self.files.remove(at) {
                let file = Rc::clone(&entry.1);
                self.files.push_back(entry);
                return Ok(file);
            }
        }
        let file = Rc::new(open_for_reading(&layout.segment(core, segment))?);
        if self.files.len() == FILES {
            self.files.pop_front();
        }
        self.files.push_back((key, Rc::clone(&file)));
        Ok(file)
    }

    /// Closes a segment that goes.
    pub fn forget(&mut self, core: u16, segment: u64) {
        self.files.retain(|(key, _)| *key != (core, segment));
    }

    /// Memory for a read; a small one is not worth a pooled buffer.
    pub fn buffer(&mut self, len: usize) -> Draft {
        if !(POOLED_BYTES_MIN..=BUFFER_BYTES).contains(&len) {
            return SlabWriter::new(len).split(len);
        }
        if self.writer.room() < len {
            let full = std::mem::replace(&mut self.writer, self.buffers.take());
            self.buffers.retire(full);
        }
        self.writer.split(len)
    }
}
