//! What the host and the configuration may get wrong: each mistake named at start, with a status
//! of its own, and nothing half started.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use crate::support::brokers::{scratch, Brokers, FIRST};
use crate::support::client::Client;
use crate::support::command::{felix, run, Ran};

const HOST_UNFIT: i32 = 6;
const SYS_IO_URING_SETUP: u32 = 425;

/// Arguments of a start that would work.
fn serve_args(brokers: &Brokers) -> Vec<String> {
    let node = brokers.cluster.node(0);
    vec![
        "serve".into(),
        "--node-id=node-1".into(),
        format!("--data-dir={}", node.data_dir().display()),
        format!("--catalog={}", brokers.cluster.catalog().display()),
        format!("--client-listen={}", node.client_addr()),
        format!("--internal-listen={}", node.internal_addr()),
        format!("--admin-listen={}", node.admin_addr()),
        "--segment-bytes=12582912".into(),
        "--reserve-bytes=12582912".into(),
    ]
}

/// Lowers the memory that may be locked, hard limit included, and takes away root's right to
/// exceed it.
fn starve(command: &mut Command, bytes: u64) -> &mut Command {
    const CAP_IPC_LOCK: libc::c_ulong = 14;
    // SAFETY: between fork and exec the closure makes two async-signal-safe system calls and
    // allocates nothing.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit {
                rlim_cur: bytes,
                rlim_max: bytes,
            };
            // Who is not root has neither the right nor a way to give it up.
            if libc::geteuid() == 0
                && libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0) != 0
            {
                return Err(std::io::Error::last_os_error());
            }
            match libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    }
}

/// Makes `io_uring_setup` fail, as the filter of a container does.
fn forbid(command: &mut Command, errno: i32) -> &mut Command {
    let op = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    // The number of the call is the first word of the filter's input.
    let filter = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            SYS_IO_URING_SETUP,
        ),
        op(
            libc::BPF_RET | libc::BPF_K,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | errno as u32,
        ),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    // SAFETY: between fork and exec the closure makes two async-signal-safe system calls and
    // allocates nothing; the filter it owns outlives them.
    unsafe {
        command.pre_exec(move || {
            let program = libc::sock_fprog {
                len: filter.len() as u16,
                filter: filter.as_ptr().cast_mut(),
            };
            if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) != 0
            {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        })
    }
}

fn assert_unfit(brokers: &Brokers, ran: &Ran, what: &str, words: &[&str]) {
    assert_eq!(ran.code(), HOST_UNFIT, "{what}: {ran:?}");
    assert!(ran.took < Duration::from_secs(5), "{what}: {ran:?}");
    let text = ran.text();
    for word in words {
        assert!(text.contains(word), "{what}: no {word:?} in {text}");
    }
    for noise in ["panicked", "RUST_BACKTRACE", "stack backtrace"] {
        assert!(!text.contains(noise), "{what}: {text}");
    }
    let admin = brokers.cluster.node(0).admin_addr();
    assert!(
        std::net::TcpStream::connect(admin).is_err(),
        "{what}: a port answers"
    );
}

#[test]
fn a_host_without_io_uring_is_named_by_start_and_check() {
    let brokers = Brokers::prepare_with(1, |_| {});
    let serve = serve_args(&brokers);
    let check = vec!["check".to_string()];
    let limit = Duration::from_secs(10);
    for args in [&serve, &check] {
        let ran = run(starve(&mut felix(args), 64 << 10), limit);
        let words = ["65536", "LimitMEMLOCK", "ulimit"];
        // What starves a process is the same for root here: the executors check it themselves.
        assert_unfit(&brokers, &ran, "little lockable memory", &["MEMLOCK"]);
        let text = ran.text();
        assert!(words.iter().any(|word| text.contains(word)), "{text}");
        let ran = run(forbid(&mut felix(args), libc::EPERM), limit);
        assert_unfit(&brokers, &ran, "forbidden", &["io_uring"]);
        let ran = run(forbid(&mut felix(args), libc::ENOSYS), limit);
        assert_unfit(&brokers, &ran, "missing", &["io_uring"]);
    }
    // Enough for half of the executors only.
    let mut many = serve;
    many.push("--cores=2".into());
    many.push("--io-memory-bytes=1048576".into());
    let ran = run(starve(&mut felix(&many), 4 << 20), limit);
    assert_unfit(
        &brokers,
        &ran,
        "lockable memory for one core of two",
        &["MEMLOCK"],
    );
}

#[test]
fn mistakes_in_settings_are_all_named_in_one_run() {
    let brokers = Brokers::prepare_with(1, |_| {});
    let limit = Duration::from_secs(10);
    // A misspelt flag, a misspelt variable, a misspelt key.
    let mut args = serve_args(&brokers);
    args.push("--segment-byte=4194304".into());
    let ran = run(&mut felix(&args), limit);
    assert_eq!(ran.code(), 2, "{ran:?}");
    assert!(ran.stderr.contains("--segment-bytes"), "{ran:?}");

    let args = serve_args(&brokers);
    let ran = run(felix(&args).env("FELIX_SEGMENT_BYTE", "4194304"), limit);
    assert_eq!(ran.code(), 2, "{ran:?}");
    assert!(ran.stderr.contains("FELIX_SEGMENT_BYTE"), "{ran:?}");
    assert!(ran.stderr.contains("FELIX_SEGMENT_BYTES"), "{ran:?}");

    let dir = scratch();
    let file = dir.path().join("broker.toml");
    let a_file = dir.path().join("a-file");
    std::fs::write(&a_file, "x").expect("a file");
    let text = format!(
        "peer-keep-alive-m = 100\npeer-receive-window-bytes = 65536\ndata-dir = {:?}\n",
        a_file
    );
    std::fs::write(&file, text).expect("a file");
    let node = brokers.cluster.node(0);
    let args = [
        "serve".to_string(),
        format!("--config={}", file.display()),
        "--node-id=node-1".into(),
        format!("--catalog={}", brokers.cluster.catalog().display()),
        format!("--client-listen={}", node.client_addr()),
        format!("--internal-listen={}", node.client_addr()),
        "--peer-idle-timeout-ms=1000".into(),
        format!(
            "--internal-tls-cert={}",
            brokers.file(0, "peer-cert.pem").display()
        ),
        "--check-config".into(),
    ];
    let checked = run(&mut felix(&args), limit);
    assert_eq!(checked.code(), 2, "{checked:?}");
    for fault in [
        "peer-keep-alive-m",
        "peer-keep-alive-ms",
        "peer-receive-window-bytes",
        "data-dir",
        "internal-listen",
        "internal-tls-key",
        "internal-tls-ca",
    ] {
        assert!(
            checked.stderr.contains(fault),
            "no {fault} in {}",
            checked.stderr
        );
    }
    let started = run(&mut felix(&args[..args.len() - 1]), limit);
    assert_eq!(started.code(), 2, "{started:?}");
    assert_eq!(started.stderr, checked.stderr, "start and check differ");
    assert_eq!(
        std::fs::read_dir(dir.path()).expect("a directory").count(),
        2
    );
}

#[test]
fn one_port_for_clients_and_peers_is_refused() {
    let brokers = Brokers::prepare_with(1, |_| {});
    let mut args = serve_args(&brokers);
    args.retain(|arg| !arg.starts_with("--internal-listen"));
    let client = brokers.cluster.node(0).client_addr();
    args.push(format!("--internal-listen={client}"));
    let ran = run(&mut felix(&args), Duration::from_secs(10));
    assert_eq!(ran.code(), 2, "{ran:?}");
    assert!(ran.stderr.contains("client-listen"), "{ran:?}");
    assert!(ran.stderr.contains("internal-listen"), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_directory_belongs_to_one_broker() {
    let mut brokers = Brokers::start(1);
    let token = brokers.token();
    let client = Client::connect(&brokers, 0).await;
    let mut stream = client.stream(&token).await;
    stream.must_publish(FIRST, b"mine").await;
    let other = Brokers::prepare_with(1, |_| {});
    let mut args = serve_args(&other);
    args.retain(|arg| !arg.starts_with("--data-dir"));
    let taken = brokers.cluster.node(0).data_dir().display().to_string();
    args.push(format!("--data-dir={taken}"));
    let ran = run(&mut felix(&args), Duration::from_secs(10));
    assert_eq!(ran.code(), 1, "somebody else's lock is no damage: {ran:?}");
    assert!(ran.text().contains(&taken), "{ran:?}");
    assert!(!ran.text().contains("panicked"), "{ran:?}");
    stream.must_publish(FIRST, b"still mine").await;
    brokers.assert_alive(0);
    // The same broker twice: its ports are taken, and the first goes on.
    let ran = run(&mut felix(&serve_args(&brokers)), Duration::from_secs(10));
    assert_eq!(ran.code(), 1, "{ran:?}");
    stream.must_publish(FIRST, b"still mine").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_directory_in_memory_works_or_is_refused() {
    let memory = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let brokers = Brokers::prepare_with(1, |_| {});
    let mut args = serve_args(&brokers);
    args.retain(|arg| !arg.starts_with("--data-dir"));
    args.push(format!("--data-dir={}", memory.path().display()));
    args.push(format!(
        "--client-cert={}",
        brokers.file(0, "client-cert.pem").display()
    ));
    args.push(format!(
        "--client-key={}",
        brokers.file(0, "client-key.pem").display()
    ));
    let mut child = felix(&args)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the program starts");
    let node = brokers.cluster.node(0);
    let started = std::time::Instant::now();
    let is_ready = loop {
        if child.try_wait().expect("a child of ours").is_some() {
            break false;
        }
        let ready = felix_uring::admin::get(node.admin_addr(), "/ready", Duration::from_secs(2));
        if ready.is_ok_and(|answer| answer.status == 200) {
            break true;
        }
        assert!(
            started.elapsed() < Duration::from_secs(10),
            "neither ready nor refused"
        );
        std::thread::sleep(Duration::from_millis(20));
    };
    if is_ready {
        let token = brokers.token();
        let client = Client::connect(&brokers, 0).await;
        let mut stream = client.stream(&token).await;
        for length in [1usize, 4095, 4096, 4097] {
            stream.must_publish(FIRST, vec![length as u8; length]).await;
        }
        let start = felix_uring::wire::client::messages::StartAt::Earliest;
        let mut events = client.subscribe(&token, FIRST, start).await;
        let lengths: Vec<usize> = events.take(4).await.iter().map(|(_, r)| r.len()).collect();
        assert_eq!(lengths, [1, 4095, 4096, 4097]);
        child.kill().expect("a child of ours");
    }
    let output = child.wait_with_output().expect("a child of ours");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!text.contains("panicked"), "{text}");
    if !is_ready {
        assert_eq!(output.status.code(), Some(HOST_UNFIT), "{text}");
        let path = memory.path().display().to_string();
        assert!(text.contains("tmpfs") && text.contains(&path), "{text}");
    }
}
