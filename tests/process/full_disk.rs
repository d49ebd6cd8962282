//! A full disk refuses writes, keeps serving reads, and heals when space returns.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use felix_uring::cluster::ClusterSpec;
use felix_uring::wire::client::messages::StartAt;
use felix_uring::wire::client::{PublishOutcome, RetryClass};

use crate::support::brokers::{scratch, Brokers, FIRST};
use crate::support::client::{code_and_class, Client};
use crate::support::SOON;

const RECORD_BYTES: usize = 256 << 10;

/// A small file system in a file; unmounted when dropped.
struct SmallDisk {
    at: PathBuf,
    _dir: tempfile::TempDir,
}

fn did(program: &str, args: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(args).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "{program}: {}",
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}

impl SmallDisk {
    fn mount(bytes: u64) -> Result<Self, String> {
        let dir = scratch();
        let image = dir.path().join("image");
        let at = dir.path().join("mounted");
        std::fs::create_dir(&at).map_err(|error| error.to_string())?;
        let file = std::fs::File::create(&image).map_err(|error| error.to_string())?;
        file.set_len(bytes).map_err(|error| error.to_string())?;
        let path = |path: &Path| path.display().to_string();
        did("mkfs.ext4", &["-q", "-F", "-m", "0", &path(&image)])?;
        did("mount", &["-o", "loop", &path(&image), &path(&at)])?;
        Ok(Self { at, _dir: dir })
    }

    /// Takes all the space but about `leave` bytes.
    fn fill(&self, leave: u64) -> PathBuf {
        let filler = self.at.join("filler");
        let free = self.free();
        let size = free.saturating_sub(leave);
        let file = std::fs::File::create(&filler).expect("a file");
        let taken = did(
            "fallocate",
            &["-l", &size.to_string(), &filler.display().to_string()],
        );
        taken.unwrap_or_else(|e| panic!("{e}"));
        file.sync_all().expect("a flush");
        filler
    }

    fn free(&self) -> u64 {
        let path = std::ffi::CString::new(self.at.display().to_string()).expect("a path");
        // SAFETY: all zeros is a valid value of this plain struct, and the call fills it in.
        let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to live values for the length of the call.
        let done = unsafe { libc::statvfs(path.as_ptr(), &mut stat) };
        assert_eq!(done, 0, "statvfs");
        stat.f_bavail * stat.f_frsize
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A mount that stays is the system's to report; the test has said what it had to say.
        let _ = did("umount", &["-l", &self.at.display().to_string()]);
    }
}

/// Skips loudly where nothing can be mounted, except where that must work.
fn small_disk(bytes: u64) -> Option<SmallDisk> {
    match SmallDisk::mount(bytes) {
        Ok(disk) => Some(disk),
        Err(why) if std::env::var("CI").as_deref() == Ok("true") => {
            panic!("a small file system cannot be mounted: {why}")
        }
        Err(why) => {
            eprintln!("SKIPPED: a small file system cannot be mounted: {why}");
            None
        }
    }
}

/// Settings that leave most of a small disk to records.
fn tight(spec: &mut ClusterSpec) {
    spec.extra_args = ["--prewritten-segments=1", "--reserve-bytes=12582912"]
        .map(String::from)
        .to_vec();
}

fn record(number: usize) -> Vec<u8> {
    let mut bytes = vec![(number % 251) as u8; RECORD_BYTES];
    bytes[..8].copy_from_slice(&(number as u64).to_be_bytes());
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_refuses_writes_and_heals() {
    let Some(disk) = small_disk(96 << 20) else {
        return;
    };
    let mut brokers = Brokers::prepare_with(1, tight);
    let data = brokers.cluster.node(0).data_dir().to_path_buf();
    std::fs::remove_dir(&data).expect("an empty directory");
    std::os::unix::fs::symlink(&disk.at, &data).expect("a link");
    // So that the segments the broker makes in advance are part of what is left.
    let filler = disk.fill(40 << 20);
    brokers.start_node(0);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let mut acked = Vec::new();
    let mut number = 0;
    let mut refusals = 0;
    let started = Instant::now();
    while refusals < 5 {
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "the disk is never full"
        );
        let asked = Instant::now();
        match stream.publish(FIRST, record(number)).await {
            PublishOutcome::Accepted { offset } => acked.push((offset.expect("an offset"), number)),
            PublishOutcome::Failed(refusal) => {
                let said = code_and_class(&refusal);
                assert_eq!(said, ("overloaded".to_string(), RetryClass::RetryAfter));
                assert!(
                    asked.elapsed() < Duration::from_secs(2),
                    "{:?}",
                    asked.elapsed()
                );
                refusals += 1;
            }
        }
        number += 1;
    }
    assert!(!acked.is_empty(), "nothing was taken at all");
    // Reads and health go on.
    let mut events = client.subscribe(&token, FIRST, StartAt::Earliest).await;
    for ((offset, payload), (said, number)) in events.take(acked.len()).await.iter().zip(&acked) {
        assert_eq!(offset, said);
        assert!(*payload == record(*number), "record {number} has changed");
    }
    brokers.wait_metric(0, "felix_storage_refused_disk_full_total", 5.0);
    assert_eq!(brokers.metric(0, "felix_storage_failed_logs"), 0.0);
    brokers.assert_alive(0);

    // A start on the full disk serves reads.
    let exit = brokers
        .cluster
        .node_mut(0)
        .stop()
        .unwrap_or_else(|e| panic!("{e}"));
    assert!(exit.is_clean(), "{exit}: {}", brokers.log(0));
    brokers.start_node(0);
    let client = Client::connect(&brokers, 0).await;
    let mut events = client.subscribe(&token, FIRST, StartAt::Earliest).await;
    assert_eq!(events.take(acked.len()).await.len(), acked.len());
    let mut stream = client.stream(&token).await;

    // Space returns, and so do writes, without a restart.
    std::fs::remove_file(filler).expect("the filler");
    stream.publish_until_taken(FIRST, SOON).await;
    for _ in 0..20 {
        let (took, _) = stream.publish_until_taken(FIRST, SOON).await;
        assert!(took < SOON);
    }
    assert_eq!(brokers.metric(0, "felix_storage_failed_logs"), 0.0);
    brokers
        .cluster
        .node_mut(0)
        .stop()
        .unwrap_or_else(|e| panic!("{e}"));
    let mut reader = storage_uring::offline::Reader::open(&disk.at, 1).expect("a readable log");
    let report = reader.verify();
    assert!(report.is_clean(), "{report:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_of_4096_byte_sectors_is_written_whole() {
    let Some(disk) = small_disk(96 << 20) else {
        return;
    };
    let mut brokers = Brokers::prepare_with(1, tight);
    let data = brokers.cluster.node(0).data_dir().to_path_buf();
    std::fs::remove_dir(&data).expect("an empty directory");
    std::os::unix::fs::symlink(&disk.at, &data).expect("a link");
    brokers.start_node(0);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    let lengths = [1usize, 4095, 4096, 4097, 65_536, 1 << 20, 0];
    for length in lengths {
        stream.must_publish(FIRST, vec![length as u8; length]).await;
    }
    let mut events = client.subscribe(&token, FIRST, StartAt::Earliest).await;
    let read: Vec<usize> = events
        .take(lengths.len())
        .await
        .iter()
        .map(|(_, r)| r.len())
        .collect();
    assert_eq!(read, lengths);
    drop(events);
    brokers
        .cluster
        .node_mut(0)
        .stop()
        .unwrap_or_else(|e| panic!("{e}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_that_hangs_does_not_hang_the_stop() {
    let Some(disk) = small_disk(96 << 20) else {
        return;
    };
    let mut brokers = Brokers::prepare_with(1, |spec| {
        spec.extra_args.push("--shutdown-deadline-ms=1000".into());
    });
    let data = brokers.cluster.node(0).data_dir().to_path_buf();
    std::fs::remove_dir(&data).expect("an empty directory");
    std::os::unix::fs::symlink(&disk.at, &data).expect("a link");
    brokers.start_node(0);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    stream.must_publish(FIRST, b"before").await;
    let mount = disk.at.display().to_string();
    did("fsfreeze", &["-f", &mount]).unwrap_or_else(|e| panic!("{e}"));
    stream.start_publish(FIRST, &[b"hangs"]).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let asked = brokers.cluster.node_mut(0).signal(libc::SIGTERM);
    asked.unwrap_or_else(|e| panic!("{e}"));
    // The process cannot end while the kernel holds its write, but it says what it gives up.
    let deadline = Instant::now() + Duration::from_secs(8);
    let mut log = brokers.log(0);
    while !log.contains("stopped with unfinished work") && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(50)).await;
        log = brokers.log(0);
    }
    did("fsfreeze", &["-u", &mount]).unwrap_or_else(|e| panic!("{e}"));
    assert!(log.contains("stopped with unfinished work"), "{log}");
    let named = "core 0: stream:t1/default/first#0: records 1 to 1 not durable";
    assert!(log.contains(named), "{log}");
    let exit = brokers
        .cluster
        .node_mut(0)
        .stop()
        .unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(
        exit.status.expect("it ran").code(),
        Some(1),
        "{exit}: {log}"
    );
    assert!(!exit.killed, "{exit}");
}
