//! A writer process is killed at any moment, also while it recovers; everything it had seen acknowledged is
//! there afterwards. Once on the file system of the build, and once on small file systems whose power is cut
//! at that moment: what they had not sent to the device is gone, directory entries and lengths included.
//!
//! `FELIX_STORAGE_KILLS=200` and `FELIX_STORAGE_POWER_CUTS=50` run that many instead of the suite's share.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use storage_uring::offline::Reader;
use storage_uring::{ControlEvent, LogRef, SegmentZeros, Storage};

use crate::common::{config, disk_dir, name, on_core, outcomes, recovered};
use crate::loop_fs::{Kind, LoopFs};

const SHARDS: u32 = 6;
/// Names the directory for the writer; without it the writer's test has nothing to do.
const DIR: &str = "FELIX_TEST_WRITER_DIR";
const SEED: &str = "FELIX_TEST_WRITER_SEED";

/// One operation; a batch is as many as it has records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Op {
    Record { salt: u64 },
    Truncate(u64),
    Place(u64),
    Base(u64),
}

/// What a log holds: the salts of its records from `base` on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Log {
    base: u64,
    salts: VecDeque<u64>,
}

impl Log {
    fn tail(&self) -> u64 {
        self.base + self.salts.len() as u64
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Record { salt } => self.salts.push_back(salt),
            Op::Truncate(to) => self.salts.truncate((to - self.base) as usize),
            Op::Place(at) => {
                *self = Self {
                    base: at,
                    ..Self::default()
                }
            }
            Op::Base(to) => {
                self.salts.drain(..(to - self.base) as usize);
                self.base = to;
            }
        }
    }
}

fn mixed(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The payload of a record; nothing else has it.
fn payload(shard: u32, offset: u64, salt: u64) -> Vec<u8> {
    let mut state = mixed(salt ^ (offset << 20) ^ (u64::from(shard) << 56));
    let len = match state % 16 {
        0 => 0,
        1 => 9000,
        n => n as usize * 90,
    };
    let mut bytes = vec![0u8; len];
    for chunk in bytes.chunks_mut(8) {
        state = mixed(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    bytes
}

// -- the writer --

/// Run by the tests below in a process of its own; says what it does on standard output, before it does it.
#[test]
fn writer_process() {
    let Ok(dir) = std::env::var(DIR) else { return };
    let seed: u64 = std::env::var(SEED).expect("set").parse().expect("a number");
    let mut settings = config(Path::new(&dir));
    settings.commits_in_flight = 4;
    // Many segments are finished, and rewritten, before the kill.
    settings.segment_bytes = 256 << 10;
    // Recovery must tell the end of a log in both kinds of segment.
    if seed % 2 == 0 {
        settings.segment_zeros = SegmentZeros::Never;
    }
    on_core(settings, move |storage| write_until_killed(storage, seed));
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A reader that is gone has killed us.
    if out
        .write_all(line.as_bytes())
        .and_then(|()| out.flush())
        .is_err()
    {
        std::process::exit(0);
    }
}

async fn write_until_killed(storage: Storage, seed: u64) {
    let logs: Vec<LogRef> = (0..SHARDS)
        .map(|shard| storage.open_log(&name(shard)).expect("opens"))
        .collect();
    for (shard, log) in logs.iter().enumerate() {
        say(&format!(
            "@S {shard} {} {}\n",
            storage.base(*log),
            storage.tail(*log)
        ));
    }
    let mut state = seed;
    let mut random = move |below: u64| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(state) % below
    };
    let mut waiting: VecDeque<(u32, usize)> = VecDeque::new();
    let mut token = 0;
    let mut rewritten = 0;
    loop {
        let so_far = storage.stats().machine.segments_rewritten;
        if so_far > rewritten {
            say(&format!("@R 0 {}\n", so_far - rewritten));
            rewritten = so_far;
        }
        let shard = random(u64::from(SHARDS)) as u32;
        let log = logs[shard as usize];
        let (base, tail) = (storage.base(log), storage.tail(log));
        // The base moves when it is durable; what was asked for meanwhile must stay above what was asked first.
        let quiet = waiting.iter().all(|(waiting, _)| *waiting != shard);
        let ops = match random(40) {
            0 if quiet => control(
                &storage,
                shard,
                log,
                Op::Truncate(tail - random(tail - base + 1).min(5)),
                token,
            ),
            1 if quiet => control(
                &storage,
                shard,
                log,
                Op::Base(base + random(tail - base + 1)),
                token,
            ),
            2 if quiet && random(4) == 0 => {
                control(&storage, shard, log, Op::Place(tail + random(9)), token)
            }
            // All but one keep little, so that segments are rewritten for that one.
            3 | 4 if quiet && shard + 1 < SHARDS => {
                let kept = random((tail - base).min(20) + 1);
                control(&storage, shard, log, Op::Base(tail - kept), token)
            }
            _ => append(&storage, shard, log, tail, 1 + random(5), token),
        };
        waiting.push_back((shard, ops));
        token += 1;
        if random(3) == 0 {
            storage.kick();
        }
        if waiting.len() > 1 + random(24) as usize {
            storage.kick();
            for done in outcomes(&storage, 1).await {
                assert!(done.result.is_ok(), "{done:?}");
                let (shard, ops) = waiting.pop_front().expect("was asked for");
                say(&format!("@K {shard} {ops}\n"));
            }
        }
    }
}

fn append(storage: &Storage, shard: u32, log: LogRef, tail: u64, count: u64, token: u64) -> usize {
    say(&format!("@A {shard} {count} {token}\n"));
    let payloads: Vec<Vec<u8>> = (tail..tail + count)
        .map(|offset| payload(shard, offset, token))
        .collect();
    let taken = storage.append(log, 1, 1, payloads.iter().map(Vec::as_slice), token);
    assert_eq!(taken, Ok(tail..tail + count));
    count as usize
}

fn control(storage: &Storage, shard: u32, log: LogRef, op: Op, token: u64) -> usize {
    let (letter, offset, event) = match op {
        Op::Record { .. } => panic!("an append"),
        Op::Truncate(to) => ('T', to, ControlEvent::Truncate(to)),
        Op::Place(at) => ('P', at, ControlEvent::Place(at)),
        Op::Base(to) => ('B', to, ControlEvent::Base(to)),
    };
    say(&format!("@{letter} {shard} {offset}\n"));
    storage.control(log, event, 1, token).expect("is taken");
    1
}

// -- the judge --

/// What is known of one log.
#[derive(Debug, Default)]
struct Known {
    acked: Log,
    pending: VecDeque<Op>,
}

#[derive(Default)]
struct Book {
    logs: [Known; SHARDS as usize],
    acked_records: u64,
    events: u64,
    unanswered: u64,
    starts: u64,
    rewritten: u64,
}

impl Book {
    fn on_line(&mut self, line: &str) {
        let Some(at) = line.find('@') else { return };
        let mut words = line[at + 1..].split_whitespace();
        let letter = words.next().expect("a letter");
        let numbers: Vec<u64> = words.map(|word| word.parse().expect("a number")).collect();
        let known = &mut self.logs[numbers[0] as usize];
        match letter {
            "S" => {
                self.starts += u64::from(numbers[0] == 0);
                assert_eq!(
                    (numbers[1], numbers[2]),
                    (known.acked.base, known.acked.tail()),
                    "a start sees what the offline reader saw"
                );
            }
            "R" => self.rewritten += numbers[1],
            "A" => known
                .pending
                .extend((0..numbers[1]).map(|_| Op::Record { salt: numbers[2] })),
            "T" => known.pending.push_back(Op::Truncate(numbers[1])),
            "P" => known.pending.push_back(Op::Place(numbers[1])),
            "B" => known.pending.push_back(Op::Base(numbers[1])),
            "K" => {
                for _ in 0..numbers[1] {
                    let op = known.pending.pop_front().expect("was announced");
                    known.acked.apply(op);
                    match op {
                        Op::Record { .. } => self.acked_records += 1,
                        Op::Truncate(_) | Op::Place(_) | Op::Base(_) => self.events += 1,
                    }
                }
            }
            other => panic!("{other}"),
        }
    }

    /// Checks what is left, and takes it as the new truth. Says which logs it went beyond.
    fn check(&self, dir: &Path) -> [Known; SHARDS as usize] {
        let mut reader = Reader::open(dir, 2).expect("opens");
        assert!(reader.report().damages.is_empty(), "{:?}", reader.report());
        std::array::from_fn(|shard| {
            let found = reader.log(&name(shard as u32));
            let (base, tail, records) = match found {
                None => (0, 0, Vec::new()),
                Some(log) => {
                    assert_eq!(log.damage, None);
                    let records = reader.records(log.id).map(|record| record.expect("reads"));
                    (log.base, log.tail, records.collect())
                }
            };
            assert_eq!(records.len() as u64, tail - base, "every record is there");
            let known = &self.logs[shard];
            let is = |state: &Log| {
                (state.base, state.tail()) == (base, tail)
                    && records
                        .iter()
                        .zip(&state.salts)
                        .all(|((offset, bytes), salt)| {
                            *bytes == payload(shard as u32, *offset, *salt)
                        })
            };
            let mut state = known.acked.clone();
            let mut rest = known.pending.iter();
            while !is(&state) {
                let Some(op) = rest.next() else {
                    panic!(
                        "shard {shard}: {base}..{tail} is no state from {}..{} on by {:?}",
                        known.acked.base,
                        known.acked.tail(),
                        known.pending
                    )
                };
                state.apply(*op);
            }
            Known {
                acked: state,
                pending: VecDeque::new(),
            }
        })
    }
}

fn start_writer(dir: &Path, seed: u64) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args([
            "--exact",
            "killed::writer_process",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(DIR, dir)
        .env(SEED, seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the writer starts");
    let said = BufReader::new(child.stdout.take().expect("piped"));
    (child, said)
}

/// Lets a writer run and kills it: at some moment of its start every fourth time, else after some
/// acknowledgements.
fn run_and_kill(book: &mut Book, dir: &Path, round: u64) {
    let (mut child, mut said) = start_writer(dir, round);
    let lines = mixed(round) % 3000;
    let mut line = String::new();
    let early = round % 4 == 3;
    if early {
        std::thread::sleep(Duration::from_millis(lines % 60));
    } else {
        for _ in 0..lines {
            line.clear();
            if said.read_line(&mut line).expect("reads") == 0 {
                panic!("the writer ended by itself: {:?}", child.wait());
            }
            book.on_line(&line);
        }
    }
    child.kill().expect("a child of ours");
    child.wait().expect("a child of ours");
    loop {
        line.clear();
        if said.read_line(&mut line).expect("reads") == 0 {
            break;
        }
        // A line cut short by the kill was not said: what it announces was not done.
        if line.ends_with('\n') {
            book.on_line(&line);
        }
    }
    book.unanswered += book
        .logs
        .iter()
        .map(|log| log.pending.len() as u64)
        .sum::<u64>();
}

fn rounds(variable: &str, of_the_suite: u64) -> u64 {
    let set = std::env::var(variable).ok();
    set.map_or(of_the_suite, |text| text.parse().expect("a number"))
}

fn report(what: &str, rounds: u64, book: &Book) {
    println!(
        "{what}: {rounds} kills ({} after the start), {} records and {} events acknowledged, {} unanswered operations, {} segments rewritten",
        book.starts, book.acked_records, book.events, book.unanswered, book.rewritten
    );
    assert!(book.acked_records > 0 && book.unanswered > 0);
    assert!(rounds < 8 || book.rewritten > 0, "segments are rewritten");
}

#[test]
fn a_killed_writer_loses_nothing_it_saw_acknowledged() {
    let dir = disk_dir();
    let rounds = rounds("FELIX_STORAGE_KILLS", 8);
    let mut book = Book::default();
    drop(storage_uring::recover(dir.path(), 1).expect("makes the directory"));
    for round in 0..rounds {
        run_and_kill(&mut book, dir.path(), round);
        book.logs = book.check(dir.path());
    }
    report("ext4 or what the build is on", rounds, &book);
}

fn power_cuts(kind: Kind, bytes: u64, sector: u32, rounds: u64) {
    let Some(disk) = LoopFs::make(kind, bytes, sector) else {
        return;
    };
    let mut book = Book::default();
    let data = disk.at.join("data");
    drop(storage_uring::recover(&data, 1).expect("makes the directory"));
    for round in 0..rounds {
        run_and_kill(&mut book, &data, round + 1000);
        let left = disk.power_cut(kind, sector);
        book.check(&left.at.join("data"));
        // A start over what is left decides the same, and a second one finds nothing to do.
        let first = recovered(&left.at.join("data"), 1);
        assert!(first.report().damages.is_empty(), "{:?}", first.report());
        drop(first);
        let second = recovered(&left.at.join("data"), 1);
        assert!(second.report().cuts.is_empty(), "{:?}", second.report());
        drop(second);
        book.check(&left.at.join("data"));
        book.logs = book.check(&data);
    }
    report(
        &format!("{kind:?}, sectors of {sector}, power cut"),
        rounds,
        &book,
    );
}

#[test]
fn power_cuts_of_ext4() {
    power_cuts(
        Kind::Ext4,
        256 << 20,
        512,
        rounds("FELIX_STORAGE_POWER_CUTS", 2),
    );
}

#[test]
fn power_cuts_of_ext4_with_large_sectors() {
    power_cuts(
        Kind::Ext4,
        256 << 20,
        4096,
        rounds("FELIX_STORAGE_POWER_CUTS", 1),
    );
}

#[test]
fn power_cuts_of_xfs() {
    power_cuts(
        Kind::Xfs,
        320 << 20,
        512,
        rounds("FELIX_STORAGE_POWER_CUTS", 1),
    );
}
