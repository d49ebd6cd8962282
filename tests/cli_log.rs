//! `log inspect|verify|dump` on directories that a storage wrote.
#![cfg(feature = "runtime")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use shard_executor::rt::{spawn_core, CoreSpec};
use storage_uring::{recover, LogKind, LogName, Storage, StorageConfig};

fn felix(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_felix-uring"))
        .args(args)
        .output()
        .expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json_lines(out: &Output) -> Vec<Value> {
    assert!(out.status.success(), "{}", text(&out.stderr));
    text(&out.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Two logs of 300 records each, on a file system where O_DIRECT works.
fn written() -> tempfile::TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let config = StorageConfig {
        segment_bytes: 1 << 20,
        commit_max_bytes: 64 << 10,
        reserve_bytes: 0,
        ..StorageConfig::new(dir.path(), 0, 1)
    };
    let recovered = recover(dir.path(), 1).unwrap();
    let core = spawn_core(CoreSpec::new(0), move || async move {
        let storage = Storage::open(config, recovered).await.unwrap();
        for shard in 0..2u32 {
            let log = storage
                .open_log(&LogName {
                    kind: LogKind::Stream,
                    tenant: "t1".into(),
                    namespace: "default".into(),
                    name: "events".into(),
                    shard,
                })
                .unwrap();
            for n in 0..300u32 {
                let payload = format!("record {shard}/{n}\n");
                storage
                    .append(log, 1, 1_000, [payload.as_bytes()].into_iter(), 0)
                    .unwrap();
            }
        }
        storage.kick();
        storage.close().await.unwrap();
    })
    .unwrap();
    core.join().unwrap();
    dir
}

fn path(dir: &Path) -> &str {
    dir.to_str().unwrap()
}

const LOG: &str = "stream/t1/default/events/1";

#[test]
fn what_was_written_is_listed_verified_and_dumped() {
    let dir = written();
    let dir = path(dir.path());
    let listed = json_lines(&felix(&["log", "inspect", dir, "--json", "--groups"]));
    let log = listed
        .iter()
        .find(|l| l["log"] == LOG)
        .expect("the log is listed");
    assert_eq!(
        (&log["base"], &log["tail"]),
        (&Value::from(0), &Value::from(300))
    );
    let records: u64 = listed
        .iter()
        .filter(|l| l["type"] == "group")
        .map(|l| l["records"].as_u64().unwrap())
        .sum();
    assert_eq!(records, 600);
    assert!(listed.iter().any(|l| l["type"] == "segment"));

    let verified = json_lines(&felix(&["log", "verify", dir, "--json"]));
    assert_eq!(verified[0]["clean"], true);
    assert_eq!(verified[0]["verify"]["records"], 600);

    let dumped = json_lines(&felix(&[
        "log",
        "dump",
        dir,
        "--only",
        LOG,
        "--from",
        "298",
        "--payload",
        "text",
        "--json",
    ]));
    let payloads: Vec<&str> = dumped
        .iter()
        .map(|l| l["payload"].as_str().unwrap())
        .collect();
    assert_eq!(payloads, ["record 1/298\n", "record 1/299\n"]);

    let out = felix(&["log", "dump", dir, "--limit", "2", "--payload", "text"]);
    assert_eq!(
        text(&out.stdout).lines().collect::<Vec<_>>(),
        [
            "stream/t1/default/events/0 0 11 record 0/0\\n",
            "stream/t1/default/events/0 1 11 record 0/1\\n",
            "stream/t1/default/events/1 0 11 record 1/0\\n",
            "stream/t1/default/events/1 1 11 record 1/1\\n",
        ]
    );
}

#[test]
fn a_flipped_byte_is_status_5() {
    let dir = written();
    let listed = json_lines(&felix(&[
        "log",
        "inspect",
        path(dir.path()),
        "--json",
        "--groups",
    ]));
    let segment = listed.iter().find(|l| l["type"] == "segment").unwrap();
    // The first group that holds records, and not the last: what follows shows that it was whole.
    let group = listed
        .iter()
        .find(|l| l["type"] == "group" && l["records"] != 0)
        .unwrap();
    let at = group["position"].as_u64().unwrap() + group["used_len"].as_u64().unwrap() - 40;
    let file = segment["file"].as_str().unwrap();
    let mut bytes = std::fs::read(file).unwrap();
    bytes[usize::try_from(at).unwrap()] ^= 0x20;
    std::fs::write(file, bytes).unwrap();
    let out = felix(&["log", "verify", path(dir.path())]);
    assert_eq!(out.status.code(), Some(5), "{}", text(&out.stdout));
    assert!(
        text(&out.stdout).contains("DAMAGED"),
        "{}",
        text(&out.stdout)
    );
}

#[test]
fn a_directory_without_data_is_a_usage_error() {
    let dir = tempfile::tempdir().unwrap();
    for bad in [path(dir.path()), "/no/such/directory", "/etc/passwd"] {
        for command in ["inspect", "verify", "dump"] {
            let out = felix(&["log", command, bad]);
            assert_eq!(
                out.status.code(),
                Some(2),
                "{command} {bad}: {}",
                text(&out.stderr)
            );
        }
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);

    let dir = written();
    let out = felix(&[
        "log",
        "dump",
        path(dir.path()),
        "--only",
        "stream/t1/default/none/0",
    ]);
    assert_eq!(out.status.code(), Some(2));
}

/// Every file with its bytes.
fn snapshot(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => dirs.push(path),
                false => drop(found.insert(path.clone(), std::fs::read(path).unwrap())),
            }
        }
    }
    found
}

/// A torn end, a blank segment and a foreign one behind it.
fn make_work_for_a_start(dir: &Path) {
    let core = dir.join("core-log/0");
    let files = std::fs::read_dir(&core).unwrap().map(|e| e.unwrap().path());
    let holds_groups = |file: &PathBuf| {
        let bytes = std::fs::read(file).unwrap();
        bytes.iter().skip(4096).any(|byte| *byte != 0)
    };
    // Segments made in advance lie behind it.
    let last = files.filter(holds_groups).max().unwrap();
    let mut bytes = std::fs::read(&last).unwrap();
    let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() / 4096 * 4096 + 4096;
    bytes[end..end + 5000].fill(0x77);
    std::fs::write(&last, bytes).unwrap();
    std::fs::write(core.join(format!("seg-{:016x}.fxl", 0x90)), vec![0; 8192]).unwrap();
}

#[test]
fn what_a_start_would_do_is_said_and_not_done() {
    let dir = written();
    make_work_for_a_start(dir.path());
    let before = snapshot(dir.path());
    let listed = json_lines(&felix(&["log", "inspect", path(dir.path()), "--json"]));
    let start = listed.iter().find(|l| l["type"] == "start").unwrap();
    assert_eq!(start["core"], 0);
    assert_eq!(start["cuts"].as_array().unwrap().len(), 1);
    assert_eq!(start["cuts"][0]["dropped_bytes"], 5000);
    assert_eq!(start["damages"].as_array().unwrap().len(), 0);
    assert_eq!(start["orderly_stop"], true);
    let cut_at = start["cuts"][0]["position"].as_u64().unwrap();
    let (segment, steps) = (
        &start["cuts"][0]["segment"],
        start["steps"].as_array().unwrap(),
    );
    let remove = serde_json::json!({ "do": "remove", "segment": 0x90 });
    let shorten = serde_json::json!({ "do": "shorten", "segment": segment, "bytes": cut_at });
    assert!(
        steps.contains(&remove) && steps.contains(&shorten),
        "{steps:?}"
    );

    let out = felix(&["log", "inspect", path(dir.path())]);
    let said = text(&out.stdout);
    for part in [
        "the last stop was orderly",
        "cut 5000 bytes",
        "remove segment 144",
        "shorten segment",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    for command in ["verify", "dump"] {
        let out = felix(&["log", command, path(dir.path())]);
        assert!(
            out.status.success(),
            "a torn end is no damage: {}",
            text(&out.stderr)
        );
    }
    assert!(snapshot(dir.path()) == before, "reading changes nothing");

    // What was said is what a start does.
    drop(recover(dir.path(), 1).unwrap());
    let after = snapshot(dir.path());
    assert!(!after
        .keys()
        .any(|file| file.ends_with(format!("seg-{:016x}.fxl", 0x90))));
    let shortened = after
        .iter()
        .filter(|(file, bytes)| before[*file].len() > bytes.len());
    let lengths: Vec<u64> = shortened.map(|(_, bytes)| bytes.len() as u64).collect();
    assert_eq!(lengths, [cut_at]);
    let listed = json_lines(&felix(&["log", "inspect", path(dir.path()), "--json"]));
    let start = listed.iter().find(|l| l["type"] == "start").unwrap();
    assert_eq!(
        start["steps"].as_array().unwrap().len(),
        0,
        "nothing is left to do"
    );
    let said = text(&felix(&["log", "inspect", path(dir.path())]).stdout);
    assert!(said.contains("it changes no file"), "{said}");
}
