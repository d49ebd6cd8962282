#![no_main]

use felix_uring_fuzz::internal_wire;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    internal_wire::decode_one_frame(data);
    internal_wire::decode_as_every_kind(data);
});
