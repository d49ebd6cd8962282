//! Whole runs of the binary: a cluster of its own, reports, refusals.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_felix-bench"))
        .args(args)
        .output()
        .expect("the binary starts")
}

fn text(output: &Output) -> String {
    format!(
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn run_to_json(dir: &Path, more: &str) -> Value {
    let json = dir.join("run.json");
    let line = format!("forward --duration 2s --warmup 300ms --rounds 1 {more} --json");
    let mut args: Vec<&str> = line.split_whitespace().collect();
    args.push(json.to_str().unwrap());
    let output = bench(&args);
    assert!(output.status.success(), "{args:?}: {}", text(&output));
    serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap()
}

/// The report of a run that must succeed. What stands behind "--" is for the brokers.
fn command_to_json(line: &str) -> Value {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let json = dir.path().join("run.json");
    let (line, serve) = line.split_once(" -- ").unwrap_or((line, ""));
    let mut args: Vec<&str> = line.split_whitespace().collect();
    args.extend(["--json", json.to_str().unwrap(), "--"]);
    args.extend(serve.split_whitespace());
    if serve.is_empty() {
        args.pop();
    }
    let output = bench(&args);
    assert!(output.status.success(), "{args:?}: {}", text(&output));
    serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap()
}

/// Every field scripts rely on is there and of its kind.
fn check_form(report: &Value) {
    let numbers = "/workload/payload_bytes /workload/batch /workload/connections \
        /workload/in_flight /workload/brokers /workload/replicas /workload/shards \
        /workload/duration_s /result/records /result/bytes /result/records_per_s /result/mb_per_s \
        /result/failed /result/unknown /result/latency_us/p50 /result/latency_us/p90 \
        /result/latency_us/p99 /result/latency_us/p999 /result/latency_us/p9999 \
        /result/latency_us/max /result/latency_us/count /verify/checked /verify/missing \
        /verify/duplicated /verify/reordered /verify/corrupt /brokers/0/cpu_s \
        /brokers/0/max_rss_bytes /brokers/1/fsyncs /brokers/1/appended_bytes \
        /brokers/1/commit_group_records_mean";
    for path in numbers.split_whitespace() {
        let value = report.pointer(path);
        assert!(value.is_some_and(Value::is_number), "{path}: {value:?}");
    }
    let texts = "/schema /workload/mode /workload/durability /brokers/0/node_id /brokers/0/role \
        /host/cpu";
    for path in texts.split_whitespace() {
        let value = report.pointer(path);
        assert!(value.is_some_and(Value::is_string), "{path}: {value:?}");
    }
    let present = "/workload/rate /limits/disk_append_mb_per_s /limits/quic_cpu_s_per_gb \
        /limits/bound_mb_per_s /limits/ratio";
    for path in present.split_whitespace() {
        assert!(report.pointer(path).is_some(), "{path}");
    }
}

#[test]
fn a_forwarded_run_is_verified_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let more = "--payload-bytes 200 --batch 8 --connections 2 --in-flight 4";
    let report = run_to_json(dir.path(), more);
    check_form(&report);
    let of = |path: &str| report.pointer(path).and_then(Value::as_f64).unwrap_or(-1.0);
    assert!(of("/result/records") > 100.0, "{report}");
    assert!(of("/verify/checked") >= of("/result/records"));
    for count in ["missing", "duplicated", "reordered", "corrupt"] {
        assert_eq!(of(&format!("/verify/{count}")), 0.0, "{count}");
    }
    assert_eq!(report["brokers"][0]["role"], "ingress");
    assert_eq!(report["brokers"][1]["role"], "owner");
    // The forwarding broker stores nothing. Brokers bring their counters up to date once a second, so
    // over a run this short only their presence says something.
    assert_eq!(of("/brokers/0/appended_bytes"), 0.0);
    assert!(of("/brokers/1/appended_bytes") > 0.0);
    assert!(of("/brokers/1/fsyncs") > 0.0);
    assert!(of("/limits/ratio") > 0.0 && of("/limits/bound_mb_per_s") > 0.0);

    // The report can be compared and drawn.
    let path = dir.path().join("run.json");
    let path = path.to_str().unwrap();
    let compared = bench(&["compare", "--all", path, path]);
    assert!(compared.status.success(), "{}", text(&compared));
    assert!(text(&compared).contains("result.records_per_s"));
    let drawn = bench(&["plot", path]);
    assert!(drawn.status.success(), "{}", text(&drawn));
    let svg = std::fs::read_to_string(dir.path().join("run.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("polyline"));
}

#[test]
fn keys_spread_records_evenly_over_shards() {
    let dir = tempfile::tempdir().unwrap();
    let more = "--shards 8 --brokers 3 --batch 4 --payload-bytes 100 --in-flight 16 --no-probe";
    let report = run_to_json(dir.path(), more);
    let per_shard: Vec<u64> = report["result"]["per_shard"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_u64)
        .collect();
    assert_eq!(per_shard.len(), 8);
    let least = *per_shard.iter().min().unwrap();
    let most = *per_shard.iter().max().unwrap();
    // Each of the four connections takes its shards in turn; with sixteen batches of four unanswered
    // the edges of the window cut off up to two batches a shard and connection, at both ends. The
    // outstanding batches also show whether a stream that feeds several owners stays in order.
    assert!(most - least <= 4 * 4 * 4 && least > 0, "{per_shard:?}");
    let owners = report["brokers"].as_array().unwrap();
    for owner in &owners[1..] {
        assert!(owner["fsyncs"].as_u64().unwrap() > 0, "{owner}");
    }
}

#[test]
fn a_fixed_schedule_reports_what_was_offered() {
    let dir = tempfile::tempdir().unwrap();
    let more = "--rate 2000 --batch 2 --payload-bytes 100 --direct --no-probe --verify subscribe";
    let report = run_to_json(dir.path(), more);
    let result = &report["result"];
    assert_eq!(result["offered_per_s"].as_f64(), Some(2000.0));
    // A machine that is busy with other things sends less; nothing makes it send more than what was due.
    let achieved = result["records_per_s"].as_f64().unwrap();
    assert!(achieved > 0.0 && achieved <= 2300.0, "{achieved}");
    let batches = result["latency_us"]["count"].as_u64().unwrap();
    assert!((1..=2000).contains(&batches), "{batches}");
    assert_eq!(report["workload"]["mode"], "direct");
    assert_eq!(report["verify"]["missing"].as_u64(), Some(0));
    // Read back over the network, the warm-up as well.
    assert!(report["verify"]["checked"].as_u64().unwrap() > 2 * batches);
}

#[test]
fn mistakes_end_before_anything_starts() {
    let wrong = bench(&["forward", "--payload-bytes", "3"]);
    assert_eq!(wrong.status.code(), Some(2), "{}", text(&wrong));
    assert!(text(&wrong).contains("at least 28"), "{}", text(&wrong));
    let line = "forward --addr 127.0.0.1:9 --ca /nonexistent --token x";
    let none = bench(&line.split_whitespace().collect::<Vec<_>>());
    assert_eq!(none.status.code(), Some(1), "{}", text(&none));
    assert!(text(&none).contains("CA file"), "{}", text(&none));
    let odd = bench(&["append", "--shards", "0"]);
    assert_eq!(odd.status.code(), Some(2), "{}", text(&odd));
}

/// The report of a run of `subscribe`, whose every delivery was right.
fn subscribe_to_json(more: &str) -> Value {
    let report = command_to_json(&format!("subscribe {more}"));
    for found in ["missing", "duplicated", "corrupt", "misplaced"] {
        assert_eq!(report["verify"][found], 0, "{report}");
    }
    report
}

#[test]
fn a_fan_out_checks_every_delivery_beside_a_bare_one() {
    let report = subscribe_to_json(
        "--subscribers 5 --payload-bytes 200 --batch 8 --rounds 1 --duration 1s --warmup 200ms \
         --lone-duration 500ms",
    );
    let of = |path: &str| report.pointer(path).and_then(Value::as_f64).unwrap_or(-1.0);
    assert!(of("/result/deliveries_per_s") > 100.0, "{report}");
    assert!(
        of("/verify/checked") >= of("/result/deliveries_per_s"),
        "{report}"
    );
    for path in [
        "/result/latency_us/p99",
        "/result/lone_us/p50",
        "/result/broker_cpu_us_per_delivery",
        "/limits/ratio",
        "/limits/cpu_ratio",
        "/limits/one_outstanding/ratio/median",
    ] {
        assert!(of(path) > 0.0, "{path}: {report}");
    }
}

#[test]
fn idle_connections_and_subscriptions_are_counted_and_still_there_at_the_end() {
    let report = subscribe_to_json("--idle-connections 21 --subscriptions 2100 --quiet 1s");
    // Each subscription got the one record published at the end: more than are served in one turn.
    assert_eq!(report["verify"]["checked"], 2100, "{report}");
    assert!(
        report["bytes_per_connection"].as_f64().unwrap() > 0.0,
        "{report}"
    );
    assert!(
        report["rss_subscribed_bytes"].as_u64().unwrap() > 1 << 20,
        "{report}"
    );
}

#[test]
fn puts_stand_beside_publishes_and_every_put_is_accounted_for() {
    let report = command_to_json(
        "cache --beside-publishes --rounds 1 --connections 2 --in-flight 32 --duration 500ms --warmup 100ms",
    );
    for kind in ["puts", "publishes"] {
        assert!(report[kind]["acknowledged"].as_u64() > Some(50), "{report}");
        assert!(
            report[kind]["per_s"]["median"].as_f64() > Some(0.0),
            "{report}"
        );
    }
    assert!(report["read_back"].as_u64() > Some(10), "{report}");
    assert!(report["ratio"]["median"].as_f64() > Some(0.0), "{report}");
}

#[test]
fn a_cache_is_watched_while_it_compacts() {
    let report = command_to_json(
        "cache --compaction --no-probe --duration 3s --warmup 0s --keys 64 --in-flight 16 --value-bytes 8KiB \
        --mix get=20,put=80 --read-back 10",
    );
    assert!(
        report["memory"]["copied_records"].as_u64() > Some(0),
        "{report}"
    );
    let effect = &report["compaction"];
    assert!(effect["during_us"]["count"].as_u64() > Some(0), "{report}");
    assert!(
        effect["otherwise_us"]["count"].as_u64() > Some(0),
        "{report}"
    );
}

#[test]
fn a_cache_run_checks_every_answer_and_comes_back_after_a_kill() {
    let report = command_to_json(
        "cache --duration 1s --warmup 100ms --keys 300 --in-flight 16 --probe-duration 200ms --reopen \
        --mix get=50,put=30,delete=10,add=10",
    );
    assert!(
        report["result"]["operations"].as_u64().unwrap() > 50,
        "{report}"
    );
    for found in ["wrong", "missing", "corrupt", "unjudged"] {
        assert_eq!(report["verify"][found], 0, "{report}");
    }
    // Each key is read back, and its counter.
    assert!(
        report["verify"]["checked"].as_u64().unwrap() >= 600,
        "{report}"
    );
    assert!(report["recovery"]["first_answer_s"].is_number(), "{report}");
    // Lone gets stood beside echoes over both hops.
    assert!(report["probe"]["ratio"].as_f64().unwrap() > 0.0, "{report}");
    assert!(
        report["probe"]["echo_peer_us"].as_f64().unwrap() > 0.0,
        "{report}"
    );
}

#[test]
fn small_publishes_run_beside_large_ones() {
    let report = command_to_json("beside --rounds 1 --duration 500ms");
    assert_eq!(report["clean"], true, "{report}");
    // Both loads moved something, and all of it was read back.
    let round = &report["rounds"][0];
    let mut measured = 0;
    for path in ["/alone_us/count", "/beside_us/count"] {
        let count = round.pointer(path).and_then(Value::as_u64);
        assert!(count > Some(0), "{path}: {report}");
        measured += count.unwrap_or(0);
    }
    // A busy machine may leave the large one no time while the small one is measured; its first batch was answered
    // before that began.
    assert!(
        report["checked"].as_u64() >= Some(measured + 15),
        "{report}"
    );
}

#[test]
fn a_killed_owner_s_waiters_are_released() {
    let report = command_to_json(
        "lose --rounds 2 --connections 2 --in-flight 16 --after 200ms -- --peer-idle-timeout-ms 1200 --peer-keep-alive-ms 300",
    );
    assert_eq!(report["clean"], true, "{report}");
    let losses = report["losses"].as_array().unwrap();
    assert_eq!(losses.len(), 2, "{report}");
    for loss in losses {
        // A closed loop has something on its way at any time, and no more than its bound.
        let released = loss["released"].as_u64().unwrap();
        assert!((1..=32).contains(&released), "{report}");
        assert!(loss["release_ms"].as_f64() > Some(0.0), "{report}");
        assert!(loss["detected_ms"].as_f64() > Some(500.0), "{report}");
    }
    assert!(report["unknown"].as_u64() > Some(1), "{report}");
}

#[test]
fn a_follower_that_fell_behind_becomes_level_and_its_copy_is_compared() {
    let report = command_to_json("replicate --behind 4MiB --rate 500 --duration 1s");
    assert!(
        report["behind_bytes"].as_u64().unwrap() >= 4 << 20,
        "{report}"
    );
    assert_eq!(report["copies"]["copies"], 2, "{report}");
    assert_eq!(report["copies"]["unequal"], 0, "{report}");
    for run in [0, 1] {
        assert!(
            report["latency_us"][run]["count"].as_u64().unwrap() > 0,
            "{report}"
        );
    }
}

#[test]
fn replicated_shards_that_are_left_alone_say_nothing_to_each_other() {
    let report = command_to_json("idle --shards 200 --duration 2s");
    let brokers = report["brokers"].as_array().unwrap();
    let led: u64 = brokers
        .iter()
        .map(|b| b["shards_led"].as_u64().unwrap())
        .sum();
    assert_eq!((brokers.len(), led), (3, 200), "{report}");
    for broker in brokers {
        // One message a second of each shard it leads to each of two followers would be some 25 KB.
        let sent = broker["sent_bytes"].as_u64().unwrap();
        assert!(sent < 15_000, "{report}");
    }
}
