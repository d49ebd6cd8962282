//! What reads of older data need besides the ring: open files and memory.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;

use crate::recovery::{open_for_reading, RecoveredSet};
use crate::rewrite::RewrittenMap;
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

/// A segment open for reading.
pub(super) struct OpenSegment {
    pub file: Rc<File>,
    /// How to read it, if it was rewritten.
    pub map: Option<Arc<RewrittenMap>>,
}

/// A core directory and a segment in it.
type Key = (u16, u64);

/// Files and buffers of one core's reads.
pub(super) struct Reading {
    files: VecDeque<(Key, Rc<OpenSegment>)>,
    /// The segment that is being rewritten, as it was: another file may have its name already.
    held: Option<(Key, Rc<OpenSegment>)>,
    /// How to read those that were rewritten since the start.
    maps: HashMap<Key, Arc<RewrittenMap>>,
    /// Used again once nobody holds a record of them.
    buffers: SlabPool,
    /// The buffer that reads are given parts of.
    writer: SlabWriter,
}

impl Reading {
    pub fn new() -> Self {
        Self {
            files: VecDeque::new(),
            held: None,
            maps: HashMap::new(),
            buffers: SlabPool::new(BUFFER_BYTES, BUFFERS),
            // As good as full: a core that never reads has no buffer.
            writer: SlabWriter::new(0),
        }
    }

    /// A segment of any core, open for reading.
    pub fn segment(
        &mut self,
        recovered: &RecoveredSet,
        core: u16,
        segment: u64,
    ) -> std::io::Result<Rc<OpenSegment>> {
        let key = (core, segment);
        if let Some((_, held)) = self.held.as_ref().filter(|(held, _)| *held == key) {
            return Ok(Rc::clone(held));
        }
        if let Some(at) = self.files.iter().position(|(held, _)| *held == key) {
            if let Some(entry) = self.files.remove(at) {
                let open = Rc::clone(&entry.1);
                self.files.push_back(entry);
                return Ok(open);
            }
        }
        let path = recovered.data_dir.layout.segment(core, segment);
        let map = self.maps.get(&key).cloned();
        let open = Rc::new(OpenSegment {
            file: Rc::new(open_for_reading(&path)?),
            map: map.or_else(|| recovered.rewritten_map(core, segment)),
        });
        self.keep(key, Rc::clone(&open));
        Ok(open)
    }

    fn keep(&mut self, key: Key, open: Rc<OpenSegment>) {
        if self.files.len() == FILES {
            self.files.pop_front();
        }
        self.files.push_back((key, open));
    }

    /// Keeps a segment open as it is until `replace` or `let_go`.
    pub fn hold(&mut self, core: u16, segment: u64, open: Rc<OpenSegment>) {
        self.held = Some(((core, segment), open));
    }

    /// The segment was not rewritten.
    pub fn let_go(&mut self) {
        self.held = None;
    }

    /// A rewritten file took the place of the segment that was held.
    pub fn replace(&mut self, core: u16, segment: u64, file: File, map: RewrittenMap) {
        self.let_go();
        self.forget(core, segment);
        let map = Arc::new(map);
        self.maps.insert((core, segment), Arc::clone(&map));
        let open = OpenSegment {
            file: Rc::new(file),
            map: Some(map),
        };
        self.keep((core, segment), Rc::new(open));
    }

    /// Closes a segment that goes.
    pub fn forget(&mut self, core: u16, segment: u64) {
        self.files.retain(|(key, _)| *key != (core, segment));
        self.maps.remove(&(core, segment));
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
