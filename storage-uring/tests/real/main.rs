//! Tests of a real storage with O_DIRECT on the file system of the build directory.

mod common;
mod device;
mod faults;
mod offline;
