#![no_main]

use felix_uring_fuzz::recovery;

libfuzzer_sys::fuzz_target!(|data: &[u8]| recovery::recover_damaged(data));
