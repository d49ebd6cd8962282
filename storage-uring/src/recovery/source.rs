//! Where recovery reads segments from: files, or the images of the tests.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::error::StorageError;
use crate::format::group::GROUP_MAGIC;
use crate::format::ALIGN;
use crate::slab::{Region, SlabWriter};

/// A segment's bytes.
pub trait SegmentSource: Send {
    /// Length of the file now.
    fn len(&self) -> u64;
    /// Whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Reads at a 4096-aligned position into an aligned buffer; short only at the end.
    fn read_at(&self, position: u64, out: &mut [u8]) -> io::Result<usize>;
    /// Takes what reading needs. A failure says nothing about the bytes.
    fn open(&self) -> io::Result<()> {
        Ok(())
    }
    /// Gives back what `open` took; the next read takes it again.
    fn close(&self) {}
    /// Notes what is under the file's name now: another file may have taken its place.
    fn refresh(&mut self) {}
}

/// A segment file. Open only while it is read, so that a directory of any size costs few descriptors.
pub struct FileSource {
    path: PathBuf,
    file: RefCell<Option<File>>,
    len: u64,
    /// Tells the file from one that took its name.
    inode: u64,
}

impl FileSource {
    /// A source for `path`. Notes the length; opens for O_DIRECT reading, or buffered where the file system refuses that, at the
    /// first read.
    pub fn new(path: &Path) -> io::Result<Self> {
        let found = std::fs::metadata(path)?;
        Ok(Self {
            path: path.to_owned(),
            file: RefCell::new(None),
            len: found.len(),
            inode: found.ino(),
        })
    }
}

/// Opens a file for reading past the page cache where that is possible.
pub(crate) fn open_for_reading(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let direct = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(path);
    match direct {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => File::open(path),
        other => other,
    }
}

impl SegmentSource for FileSource {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, position: u64, out: &mut [u8]) -> io::Result<usize> {
        self.open()?;
        match self.file.borrow().as_ref() {
            Some(file) => read_full(file, position, out),
            None => Ok(0),
        }
    }

    fn open(&self) -> io::Result<()> {
        let mut file = self.file.borrow_mut();
        if file.is_none() {
            let found = open_for_reading(&self.path)?;
            if found.metadata()?.ino() != self.inode {
                let replaced = "another file has its name now";
                return Err(io::Error::new(io::ErrorKind::NotFound, replaced));
            }
            *file = Some(found);
        }
        Ok(())
    }

    fn close(&self) {
        self.file.borrow_mut().take();
    }

    fn refresh(&mut self) {
        // One that is gone is noticed when it is read.
        if let Ok(found) = std::fs::metadata(&self.path) {
            (self.len, self.inode) = (found.len(), found.ino());
        }
    }
}

/// Reads until `out` is full or the file ends.
fn read_full(file: &File, position: u64, out: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < out.len() {
        match file.read_at(&mut out[done..], position + done as u64) {
            Ok(0) => break,
            // A direct read that ends off a block has met the end of the file.
            Ok(n) if n % ALIGN != 0 => return Ok(done + n),
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// A frozen image of a segment, for tests and for reading copies.
pub struct ImageSource(pub Vec<u8>);

impl SegmentSource for ImageSource {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, position: u64, out: &mut [u8]) -> io::Result<usize> {
        let start = usize::try_from(position)
            .unwrap_or(usize::MAX)
            .min(self.0.len());
        let n = out.len().min(self.0.len() - start);
        out[..n].copy_from_slice(&self.0[start..start + n]);
        Ok(n)
    }
}

/// Bytes read ahead at once.
const READ_AHEAD: usize = 1 << 20;

/// A moving view of one segment.
pub(crate) struct Window {
    source: Box<dyn SegmentSource>,
    start: u64,
    bytes: Option<Region>,
    /// The file could not be opened: no descriptors left, or removed since it was listed.
    fault: Option<io::Error>,
}

impl Window {
    pub fn new(source: Box<dyn SegmentSource>) -> Self {
        Self {
            source,
            start: 0,
            bytes: None,
            fault: None,
        }
    }

    pub fn len(&self) -> u64 {
        self.source.len()
    }

    /// Up to `len` bytes at `position`; fewer only at the end of the file.
    pub fn get(&mut self, position: u64, len: usize) -> &[u8] {
        let end = position.saturating_add(len as u64).min(self.source.len());
        let held = self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64);
        if position < self.start || end > self.start + held || self.bytes.is_none() {
            self.fill(position, len);
        }
        let Some(bytes) = &self.bytes else { return &[] };
        let from = ((position - self.start) as usize).min(bytes.len());
        &bytes.as_ref()[from..bytes.len().min(from + len)]
    }

    /// Gives the buffer and the file back; the next `get` reads anew.
    pub fn release(&mut self) {
        self.bytes = None;
        self.source.close();
    }

    /// Gives everything back, and notes what is under the file's name now.
    pub fn refresh(&mut self) {
        self.release();
        self.source.refresh();
    }

    /// Fails if the file could not be opened at some time: what was seen of it then is not to be trusted.
    pub fn check(&mut self, file: &Path) -> Result<(), StorageError> {
        match self.fault.take() {
            Some(error) => Err(StorageError::io("opening", file, error)),
            None => Ok(()),
        }
    }

    fn fill(&mut self, position: u64, len: usize) {
        let start = position / ALIGN as u64 * ALIGN as u64;
        let wanted = (len + (position - start) as usize)
            .max(READ_AHEAD)
            .min(usize::try_from(self.source.len().saturating_sub(start)).unwrap_or(usize::MAX))
            .next_multiple_of(ALIGN);
        // Give the former buffer back before taking another.
        self.bytes = None;
        if let Err(error) = self.source.open() {
            self.fault = Some(error);
            return;
        }
        let mut writer = SlabWriter::new(wanted);
        let read = match self.source.read_at(start, &mut writer.tail()[..wanted]) {
            Ok(read) => read,
            Err(error) => {
                tracing::error!(position = start, %error, "a segment cannot be read; its bytes count as damaged");
                let here = usize::try_from(self.source.len().saturating_sub(start))
                    .unwrap_or(0)
                    .min(wanted);
                self.read_block_by_block(start, &mut writer.tail()[..here])
            }
        };
        self.start = start;
        self.bytes = Some(writer.split(read).freeze());
    }

    /// Saves what can be read. Blocks that cannot are filled with what never looks like an unfinished write
    /// and starts like a group: one may have been there, so it must not pass for garbage behind the end.
    fn read_block_by_block(&self, start: u64, out: &mut [u8]) -> usize {
        for (i, block) in out.chunks_mut(ALIGN).enumerate() {
            if self
                .source
                .read_at(start + (i * ALIGN) as u64, block)
                .is_err()
            {
                block.fill(0xff);
                let magic = GROUP_MAGIC.to_le_bytes();
                let start = magic.len().min(block.len());
                block[..start].copy_from_slice(&magic[..start]);
            }
        }
        out.len()
    }
}
