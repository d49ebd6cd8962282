//! Every cause on a made-up host.

use std::collections::HashMap;
use std::path::Path;

use shard_executor::topology::{CoreRequest, Cpu, Topology};

use super::*;

/// A good host; a test spoils one thing.
struct Host {
    release: &'static str,
    sysctls: HashMap<&'static str, &'static str>,
    ring: Result<(), RingFailure>,
    locked_bytes: Option<u64>,
    open_files: Option<u64>,
    free_locking: bool,
    seccomp: bool,
    container: Option<&'static str>,
    cpus: usize,
    governor: Option<&'static str>,
    huge_pages: &'static str,
    directory: Result<DirectoryFacts, DirectIoFailure>,
}

impl Default for Host {
    fn default() -> Self {
        let buffers = [
            ("net.core.rmem_max", "8388608"),
            ("net.core.wmem_max", "8388608"),
        ];
        Self {
            release: "6.1.0-18-amd64",
            sysctls: buffers
                .into_iter()
                .chain([("kernel.io_uring_disabled", "0")])
                .collect(),
            ring: Ok(()),
            locked_bytes: None,
            open_files: Some(65_536),
            free_locking: false,
            seccomp: false,
            container: None,
            cpus: 8,
            governor: Some("performance"),
            huge_pages: "madvise",
            directory: Ok(place("ext4")),
        }
    }
}

fn place(file_system: &str) -> DirectoryFacts {
    let file_system = file_system.into();
    DirectoryFacts {
        tried: "/data/logs".into(),
        mount: "/data".into(),
        file_system,
    }
}

impl HostFacts for Host {
    fn kernel_release(&self) -> String {
        self.release.into()
    }
    fn sysctl(&self, name: &str) -> Option<String> {
        self.sysctls.get(name).map(ToString::to_string)
    }
    fn probe_ring(&self) -> Result<(), RingFailure> {
        self.ring
    }
    fn limit(&self, resource: Resource) -> Limit {
        let value = match resource {
            Resource::LockedMemory => self.locked_bytes,
            Resource::OpenFiles => self.open_files,
        };
        Limit {
            soft: value,
            hard: value,
        }
    }
    fn may_lock_freely(&self) -> bool {
        self.free_locking
    }
    fn has_seccomp_filter(&self) -> bool {
        self.seccomp
    }
    fn container(&self) -> Option<String> {
        self.container.map(Into::into)
    }
    fn topology(&self) -> Result<Topology, String> {
        let cpu = |id| Cpu {
            id,
            node: 0,
            siblings: vec![id],
        };
        Ok(Topology::from_cpus((0..self.cpus).map(cpu).collect()))
    }
    fn allowed_cpus(&self) -> Result<Vec<usize>, String> {
        Ok((0..self.cpus).collect())
    }
    fn governor(&self, _cpu: usize) -> Option<String> {
        self.governor.map(Into::into)
    }
    fn huge_pages(&self) -> Option<String> {
        Some(self.huge_pages.into())
    }
    fn probe_directory(&self, _dir: &Path) -> Result<DirectoryFacts, DirectIoFailure> {
        self.directory.clone()
    }
}

fn report(host: &Host) -> PreflightReport {
    let input = PreflightInput::new(Some("/data/logs".into()), CoreRequest::Count(4), 128);
    run_with(host, &input)
}

/// The only check that is not ok.
fn only_bad(host: &Host) -> Check {
    let report = report(host);
    let bad: Vec<&Check> = report
        .checks
        .iter()
        .filter(|c| c.status != Status::Ok)
        .collect();
    assert_eq!(bad.len(), 1, "{bad:#?}");
    assert_eq!(report.ok, bad[0].status == Status::Warn);
    assert_eq!(report.failure_message().is_none(), report.ok);
    bad[0].clone()
}

fn refused(errno: i32) -> Result<(), RingFailure> {
    Err(RingFailure {
        call: "io_uring_setup",
        errno,
    })
}

fn has_all_remedies(check: &Check) -> bool {
    let remedy = &check.remedy;
    [&remedy.shell, &remedy.unit, &remedy.container]
        .iter()
        .all(|text| !text.is_empty())
}

#[test]
fn a_good_host_passes() {
    let report = report(&Host::default());
    assert!(report.ok);
    assert!(
        report.checks.iter().all(|c| c.status == Status::Ok),
        "{report:#?}"
    );
    assert_eq!(report.failure_message(), None);
    let names: Vec<&str> = report.checks.iter().map(|c| c.name).collect();
    let expected = [
        "kernel",
        "io_uring",
        "cores",
        "locked-memory",
        "open-files",
        "data-directory",
        "udp-buffers",
        "cpu-governor",
        "huge-pages",
    ];
    assert_eq!(names, expected);
    let cores = &report.checks[2].current;
    assert!(
        cores.contains("data cores on CPU 1,2,3,4, control threads on CPU 0,5,6,7"),
        "{cores}"
    );
}

#[test]
fn an_old_kernel_is_named_with_the_version_needed() {
    let check = only_bad(&Host {
        release: "5.4.0-216-generic",
        ..Host::default()
    });
    assert_eq!((check.name, check.status), ("kernel", Status::Fail));
    assert!(check.current.contains("5.4.0") && check.needed.contains("5.8"));
    assert!(has_all_remedies(&check));
    let check = only_bad(&Host {
        release: "5.10.0",
        ..Host::default()
    });
    assert_eq!(check.status, Status::Warn);
    assert!(
        report(&Host {
            release: "5.8.0",
            ..Host::default()
        })
        .ok
    );
    assert!(
        report(&Host {
            release: "10.0-rc1",
            ..Host::default()
        })
        .ok
    );
    assert_eq!(
        only_bad(&Host {
            release: "custom",
            ..Host::default()
        })
        .status,
        Status::Warn
    );
}

#[test]
fn the_system_switch_is_told_from_a_filter() {
    let with_switch = |value, group| {
        let mut host = Host {
            ring: refused(libc::EPERM),
            seccomp: true,
            ..Host::default()
        };
        host.sysctls.insert("kernel.io_uring_disabled", value);
        host.sysctls.insert("kernel.io_uring_group", group);
        only_bad(&host)
    };
    let check = with_switch("2", "-1");
    assert_eq!((check.name, check.status), ("io_uring", Status::Fail));
    assert!(
        check.cause.contains("kernel.io_uring_disabled is 2"),
        "{}",
        check.cause
    );
    assert!(check
        .remedy
        .shell
        .contains("sysctl -w kernel.io_uring_disabled=0"));
    let check = with_switch("1", "1234");
    assert!(check.cause.contains("(now 1234)") && check.remedy.unit.contains("1234"));
    assert!(with_switch("1", "-1")
        .remedy
        .shell
        .contains("io_uring_group="));
    let check = with_switch("0", "-1");
    assert!(
        check.cause.contains("seccomp") && !check.cause.contains("is 2"),
        "{}",
        check.cause
    );
    assert!(check.remedy.container.contains("seccomp="));
}

#[test]
fn a_container_filter_is_named() {
    let host = Host {
        ring: refused(libc::EPERM),
        seccomp: true,
        container: Some("Docker"),
        ..Host::default()
    };
    let check = only_bad(&host);
    assert!(
        check.cause.contains("seccomp) of the Docker container"),
        "{}",
        check.cause
    );
    assert!(
        check.current.contains("not permitted (EPERM)"),
        "{}",
        check.current
    );
    // Kernels before 6.6 have no switch at all.
    let mut host = Host {
        ring: refused(libc::EACCES),
        ..Host::default()
    };
    host.sysctls.remove("kernel.io_uring_disabled");
    let check = only_bad(&host);
    assert!(
        check.cause.contains("absent") && check.cause.contains("SELinux"),
        "{}",
        check.cause
    );
}

#[test]
fn not_implemented_has_three_reasons() {
    let ring = refused(libc::ENOSYS);
    let check = only_bad(&Host {
        ring,
        ..Host::default()
    });
    assert!(check.cause.contains("CONFIG_IO_URING"), "{}", check.cause);
    let check = only_bad(&Host {
        ring,
        container: Some("Podman"),
        ..Host::default()
    });
    assert!(check.cause.contains("Podman"), "{}", check.cause);
    let old = report(&Host {
        ring,
        release: "4.19.0",
        ..Host::default()
    });
    assert_eq!(
        old.with_status(Status::Fail).count(),
        2,
        "kernel and io_uring"
    );
    assert!(old
        .failure_message()
        .expect("fails")
        .contains("no usable io_uring"));
}

#[test]
fn other_refusals_of_a_ring_are_explained() {
    let cases = [
        (libc::ENOMEM, "lock memory"),
        (libc::EMFILE, "file descriptor"),
        (libc::EINVAL, "not this use"),
        (libc::EIO, "no name for"),
    ];
    for (errno, cause) in cases {
        let check = only_bad(&Host {
            ring: refused(errno),
            ..Host::default()
        });
        assert!(check.cause.contains(cause), "{errno}: {}", check.cause);
        assert!(!check.remedy.shell.is_empty());
    }
}

#[test]
fn locked_memory_counts_all_executors() {
    let needed = shard_executor::memlock::required_bytes(4, 1 << 20, 128);
    assert!(
        report(&Host {
            locked_bytes: Some(needed),
            ..Host::default()
        })
        .ok
    );
    let check = only_bad(&Host {
        locked_bytes: Some(needed / 2),
        ..Host::default()
    });
    assert_eq!((check.name, check.status), ("locked-memory", Status::Fail));
    assert!(check.cause.contains("enough for 2 of 4"), "{}", check.cause);
    assert!(check
        .remedy
        .unit
        .contains(&format!("LimitMEMLOCK={needed}")));
    assert!(has_all_remedies(&check));
    assert!(only_bad(&Host {
        locked_bytes: Some(needed - 1),
        ..Host::default()
    })
    .cause
    .contains("3 of 4"));
}

#[test]
fn sixty_four_kib_fail_even_for_root() {
    for free_locking in [false, true] {
        let host = Host {
            locked_bytes: Some(64 << 10),
            free_locking,
            ..Host::default()
        };
        let check = only_bad(&host);
        assert!(check.current.contains("64 KiB") && check.cause.contains("512 KiB"));
    }
    let root = Host {
        locked_bytes: Some(512 << 10),
        free_locking: true,
        ..Host::default()
    };
    assert!(report(&root).ok, "not charged with CAP_IPC_LOCK");
    assert!(
        !report(&Host {
            free_locking: false,
            ..root
        })
        .ok
    );
}

#[test]
fn too_many_cores_are_refused_and_tight_ones_warned_about() {
    let check = only_bad(&Host {
        cpus: 3,
        ..Host::default()
    });
    assert_eq!((check.name, check.status), ("cores", Status::Fail));
    assert!(
        check.cause.contains("4 cores") && check.cause.contains("0,1,2"),
        "{}",
        check.cause
    );
    let check = only_bad(&Host {
        cpus: 4,
        ..Host::default()
    });
    assert_eq!((check.name, check.status), ("cores", Status::Warn));
}

#[test]
fn open_files() {
    let check = only_bad(&Host {
        open_files: Some(256),
        ..Host::default()
    });
    assert_eq!((check.name, check.status), ("open-files", Status::Fail));
    let check = only_bad(&Host {
        open_files: Some(1024),
        ..Host::default()
    });
    assert_eq!((check.name, check.status), ("open-files", Status::Warn));
    assert!(has_all_remedies(&check));
}

#[test]
fn slow_settings_only_warn() {
    let mut host = Host::default();
    host.sysctls.insert("net.core.rmem_max", "212992");
    let check = only_bad(&host);
    assert_eq!((check.name, check.status), ("udp-buffers", Status::Warn));
    assert!(check.current.contains("212992") && check.needed.contains("4194304"));
    let check = only_bad(&Host {
        governor: Some("powersave"),
        ..Host::default()
    });
    assert_eq!((check.name, check.status), ("cpu-governor", Status::Warn));
    assert!(
        report(&Host {
            governor: None,
            ..Host::default()
        })
        .ok
    );
    let check = only_bad(&Host {
        huge_pages: "always",
        ..Host::default()
    });
    assert_eq!((check.name, check.status), ("huge-pages", Status::Warn));
}

#[test]
fn directories_are_refused_by_mount_file_system_and_cause() {
    let failing = |errno| {
        let failure = DirectIoFailure {
            place: place("zfs"),
            step: "write directly",
            errno,
        };
        only_bad(&Host {
            directory: Err(failure),
            ..Host::default()
        })
    };
    let check = failing(libc::EINVAL);
    assert_eq!((check.name, check.status), ("data-directory", Status::Fail));
    assert!(
        check.cause.contains("zfs mounted on /data"),
        "{}",
        check.cause
    );
    assert!(has_all_remedies(&check));
    assert!(failing(libc::EROFS).cause.contains("read-only"));
    assert!(failing(libc::ENOSPC).cause.contains("no space"));
    assert!(failing(libc::EACCES).remedy.shell.contains("chown"));
    assert!(failing(libc::ENOTDIR).cause.contains("not a directory"));
    assert!(failing(libc::EIO).remedy.shell.contains("dmesg"));
    let check = only_bad(&Host {
        directory: Ok(place("tmpfs")),
        ..Host::default()
    });
    assert_eq!(check.status, Status::Warn);
    assert!(check.cause.contains("memory file system"));
}

#[test]
fn text_and_json_say_the_same() {
    let host = Host {
        ring: refused(libc::EPERM),
        seccomp: true,
        ..Host::default()
    };
    let report = report(&host);
    let text = report.to_text();
    let message = report.failure_message().expect("fails");
    assert!(text.contains("FAIL io_uring: io_uring_setup refused: not permitted (EPERM)"));
    assert!(
        text.ends_with("this host cannot run felix-uring (1 failed, 0 warnings)\n"),
        "{text}"
    );
    assert!(
        message.starts_with("this host cannot run felix-uring:\nFAIL io_uring"),
        "{message}"
    );
    assert!(!message.contains("ok  "), "only what failed");
    let json: serde_json::Value = serde_json::from_str(&report.to_json()).expect("JSON");
    assert_eq!(json["ok"], false);
    assert_eq!(json["checks"][1]["name"], "io_uring");
    assert_eq!(json["checks"][1]["status"], "fail");
    assert_eq!(json["checks"][1]["cause"], report.checks[1].cause);
    assert!(json["checks"][1]["remedy"]["container"].is_string());
}
