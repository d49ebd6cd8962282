//! What reads of older data need besides the ring: open files and memory.

use std::collections::VecDeque;
use std::fs::File;
use std::rc::Rc;

use crate::datadir::Layout;
use crate::recovery::open_for_reading;
use crate::slab::{Draft, SlabPool, SlabWriter};

/// Size of a pooled buffer, the largest transfer; and how many idle ones are kept.
const BUFFER_BYTES: usize = 1 << 20;
const BUFFERS: usize = 4;
/// Files kept open.
const FILES: usize = 64;

/// Files and buffers of one core's reads.
pub(super) struct Reading {
    files: VecDeque<((u16, u64), Rc<File>)>,
    /// Used again once nobody holds a record of them.
    buffers: SlabPool,
}

impl Reading {
    pub fn new() -> Self {
        Self {
            files: VecDeque::new(),
            buffers: SlabPool::new(BUFFER_BYTES, BUFFERS),
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
        if len > self.buffers.slab_bytes() || len * 16 < self.buffers.slab_bytes() {
            return SlabWriter::new(len).split(len);
        }
        let mut writer = self.buffers.take();
        let draft = writer.split(len);
        self.buffers.retire(writer);
        draft
    }
}
