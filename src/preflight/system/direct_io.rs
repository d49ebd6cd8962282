//! One durable direct write and read in a directory.

use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const BLOCK_BYTES: usize = 4096;

type Failure = (&'static str, i32);

/// Makes a file in `dir`, writes and reads back one block with direct I/O, and removes the file.
pub(super) fn try_in(dir: &Path) -> Result<(), Failure> {
    if !dir.is_dir() {
        return Err(("look up the directory", libc::ENOTDIR));
    }
    let path = dir.join(format!(".preflight-{}", std::process::id()));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_DIRECT | libc::O_DSYNC)
        .open(&path);
    let result = match file {
        Ok(file) => write_and_read(&file),
        Err(error) => Err(failed("create a file for direct I/O", &error)),
    };
    // Some file systems make the file and then refuse the flag.
    match std::fs::remove_file(&path) {
        Err(error) if result.is_ok() => Err(failed("remove a file", &error)),
        _ => result,
    }
}

fn write_and_read(file: &File) -> Result<(), Failure> {
    let mut block = AlignedBlock::new();
    block.bytes().fill(0xa5);
    file.write_all_at(block.bytes(), 0)
        .map_err(|error| failed("write directly", &error))?;
    block.bytes().fill(0);
    file.read_exact_at(block.bytes(), 0)
        .map_err(|error| failed("read directly", &error))?;
    if block.bytes().iter().any(|&byte| byte != 0xa5) {
        return Err(("compare what was read with what was written", libc::EIO));
    }
    Ok(())
}

fn failed(step: &'static str, error: &io::Error) -> Failure {
    (step, error.raw_os_error().unwrap_or(libc::EIO))
}

/// One block whose address is a multiple of its size.
struct AlignedBlock(*mut u8);

impl AlignedBlock {
    const LAYOUT: Layout = match Layout::from_size_align(BLOCK_BYTES, BLOCK_BYTES) {
        Ok(layout) => layout,
        Err(_) => panic!("a power of two is a valid alignment"),
    };

    fn new() -> Self {
        // SAFETY: the layout has a size.
        let pointer = unsafe { alloc_zeroed(Self::LAYOUT) };
        if pointer.is_null() {
            std::alloc::handle_alloc_error(Self::LAYOUT);
        }
        Self(pointer)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the block is live, initialised, of this size and borrowed through `self`.
        unsafe { std::slice::from_raw_parts_mut(self.0, BLOCK_BYTES) }
    }
}

impl Drop for AlignedBlock {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.0, Self::LAYOUT) }
    }
}
