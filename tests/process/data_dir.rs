//! The directory of the data: what becomes of a broker that loses it, and who may read it.

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use felix_uring::wire::client::messages::StartAt;

use crate::support::brokers::{Brokers, FIRST};
use crate::support::client::{refusal, Client};
use crate::support::SOON;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_is_renamed_away_ends_writes_and_readiness() {
    let mut brokers = Brokers::start(1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    assert_eq!(stream.must_publish(FIRST, b"kept").await, 0);
    assert_eq!(brokers.metric(0, "felix_data_dir_lost"), 0.0);
    let dir = brokers.cluster.node(0).data_dir().to_path_buf();
    let away = dir.with_extension("away");
    std::fs::rename(&dir, &away).expect("renamed");
    brokers.wait_metric(0, "felix_data_dir_lost", 1.0);

    // Nothing is acknowledged that the next start would not find.
    let asked = Instant::now();
    while brokers.metric(0, "felix_storage_failed_logs") == 0.0 {
        assert!(asked.elapsed() < SOON, "the logs go on");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (code, _) = refusal(stream.publish(FIRST, b"lost").await);
    assert_eq!(code, "storage");
    let admin = brokers.cluster.node(0).admin_addr();
    let ready = felix_uring::admin::get(admin, "/ready", Duration::from_secs(2)).expect("answers");
    assert_eq!(ready.status, 503, "{}", ready.body);
    assert!(
        ready.body.contains("the data directory is gone"),
        "{}",
        ready.body
    );
    assert_eq!(brokers.metric(0, "felix_ready"), 0.0);
    let exit = brokers.cluster.node_mut(0).stop();
    let exit = exit.unwrap_or_else(|e| panic!("{e}"));
    let code = exit.status.and_then(|status| status.code());
    assert_eq!(code, Some(1), "{exit}: {}", brokers.log(0));
    let log = brokers.log(0);
    let said = log.matches("Put the directory back under its name").count();
    assert_eq!(said, 1, "{log}");
    assert!(!log.contains("disk is full"), "{log}");

    std::fs::remove_dir_all(&dir).ok();
    std::fs::rename(&away, &dir).expect("renamed");
    brokers.start_node(0);
    let client = Client::connect(&brokers, 0).await;
    let mut events = client.subscribe(&token, FIRST, StartAt::Earliest).await;
    assert_eq!(&events.take(1).await[0].1[..], b"kept");
    let mut stream = client.stream(&token).await;
    assert_eq!(stream.must_publish(FIRST, b"next").await, 1);
}

#[test]
fn a_directory_the_broker_makes_is_its_own_alone() {
    let mut brokers = Brokers::prepare_with(1, |_| {});
    let dir = brokers.cluster.node(0).data_dir().to_path_buf();
    let warned = "can be read by every user of this host";
    std::fs::remove_dir(&dir).expect("an empty directory");
    brokers.start_node(0);
    let mode = std::fs::metadata(&dir).expect("made").permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    assert!(!brokers.log(0).contains(warned), "{}", brokers.log(0));

    // One that was there keeps its mode.
    let stopped = brokers.cluster.node_mut(0).stop();
    stopped.unwrap_or_else(|e| panic!("{e}"));
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).expect("set");
    brokers.start_node(0);
    let mode = std::fs::metadata(&dir).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
    assert!(brokers.log(0).contains(warned), "{}", brokers.log(0));
}
