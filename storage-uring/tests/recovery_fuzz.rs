//! The body of the recovery fuzz target on seeded inputs.
//!
//! `FELIX_FUZZ_INPUTS=1000000` runs that many instead of the suite's share, `FELIX_FUZZ_SEED` names the
//! first.

#[path = "../../fuzz/src/recovery.rs"]
mod fuzzed;

fn number(variable: &str, otherwise: u64) -> u64 {
    let set = std::env::var(variable).ok();
    set.map_or(otherwise, |text| text.parse().expect("a number"))
}

fn mixed(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn seeded_damage_is_recovered_the_same_way_twice() {
    let first = number("FELIX_FUZZ_SEED", 1);
    let inputs = number("FELIX_FUZZ_INPUTS", 600);
    for seed in first..first + inputs {
        let mut state = mixed(seed);
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mixed(state)
        };
        let script = 20 + next() % 200;
        let mut input: Vec<u8> = (0..script).map(|_| next() as u8 & 0xfe).collect();
        // The script ends, the damage begins; sometimes there is none.
        input.push(0xff);
        input.extend((0..next() % 60).map(|_| next() as u8));
        let ran = std::panic::catch_unwind(|| fuzzed::recover_damaged(&input));
        assert!(
            ran.is_ok(),
            "replay with FELIX_FUZZ_SEED={seed} FELIX_FUZZ_INPUTS=1"
        );
    }
}

/// Core 0 loses its first segment's header and has an unfinished group at the start of its second, which goes; on
/// core 1 there is a loss in an epoch of which no segment's header is left. Whether a log of core 0 may have been in it
/// was decided by what the removed segment had said.
const ONLY_A_REMOVED_SEGMENT_KNEW: [u8; 98] = [
    0x26, 0x3b, 0xff, 0x10, 0xff, 0xdb, 0xc6, 0xc6, 0x7f, 0xad, 0x2f, 0xfc, 0xf8, 0xed, 0x14, 0x23,
    0x33, 0x73, 0x29, 0x14, 0x16, 0xc6, 0xc6, 0xc7, 0xff, 0xf6, 0xfe, 0x00, 0x2a, 0x00, 0x02, 0xc6,
    0x05, 0xc6, 0x25, 0xc6, 0xc6, 0xc6, 0x27, 0xc6, 0xc6, 0x7f, 0xad, 0x2f, 0xfc, 0xf8, 0xed, 0x14,
    0x01, 0x00, 0x00, 0x05, 0xc9, 0xff, 0xc6, 0xc6, 0xc6, 0xc3, 0xbd, 0x29, 0x5e, 0x03, 0x10, 0x00,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x2d, 0x97, 0x14, 0x2f, 0xfc, 0xf8, 0xed, 0x14, 0x33, 0x33, 0x33,
    0x32, 0x20, 0x00, 0x8d, 0x8d, 0x9f, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x8d, 0xc6, 0xc6,
    0xc6, 0xc6,
];

#[test]
fn what_only_a_removed_segment_knew_decides_nothing() {
    fuzzed::recover_damaged(&ONLY_A_REMOVED_SEGMENT_KNEW);
}
