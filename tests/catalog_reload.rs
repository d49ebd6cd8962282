//! A catalog file that changes under a running broker.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use felix_uring::auth::SigningKey;
use felix_uring::catalog::{
    check_accepted, Catalog, CatalogDraft, CatalogFile, CatalogWatch, DraftAssignment, DraftNode,
    DraftSharded, DraftTenant,
};
use felix_uring::ids::{Generation, ShardId};

struct Site {
    dir: tempfile::TempDir,
    draft: CatalogDraft,
    now: Instant,
}

fn stream(name: &str, shards: u32) -> DraftSharded {
    DraftSharded {
        tenant: "t1".into(),
        namespace: "ns".into(),
        name: name.into(),
        shards,
        replicas: 1,
        ..DraftSharded::default()
    }
}

fn assigned(leader: &str, generation: u64) -> DraftAssignment {
    DraftAssignment {
        kind: "stream".into(),
        tenant: "t1".into(),
        namespace: "ns".into(),
        name: "s".into(),
        shard: 0,
        leader: leader.into(),
        replicas: Vec::new(),
        generation: Some(generation),
    }
}

impl Site {
    fn new() -> Self {
        let node = |n: u16| DraftNode {
            id: format!("broker-{n}"),
            client: format!("127.0.0.1:{}", 5000 + n),
            internal: format!("127.0.0.1:{}", 6000 + n),
        };
        let site = Self {
            dir: tempfile::tempdir().expect("a directory"),
            draft: CatalogDraft {
                nodes: vec![node(1), node(2), node(3)],
                tenants: vec![DraftTenant {
                    id: "t1".into(),
                    jwks_file: Some("keys.json".into()),
                    keys: Vec::new(),
                }],
                streams: vec![stream("s", 2)],
                assignments: vec![assigned("broker-1", 5)],
                ..CatalogDraft::default()
            },
            now: Instant::now(),
        };
        site.write_key("k1");
        site.write();
        site
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("catalog.toml")
    }

    fn write(&self) {
        std::fs::write(self.path(), self.draft.to_toml().expect("serialises")).expect("written");
    }

    fn write_key(&self, kid: &str) {
        let key = SigningKey::generate().expect("random bytes");
        std::fs::write(self.dir.path().join("keys.json"), key.to_jwks(kid)).expect("written");
    }

    fn watch(&self) -> CatalogWatch {
        CatalogFile::load(&self.path())
            .expect("valid")
            .watch(self.now)
    }

    /// Looks a second later: "same", "new", or the text of what is wrong.
    fn look(&mut self, watch: &mut CatalogWatch) -> String {
        assert!(
            watch.poll(self.now, &|_| Ok(())).is_none(),
            "looked before a second had passed"
        );
        self.now += Duration::from_secs(1);
        match watch.poll(self.now, &|_| Ok(())) {
            None => "same".to_string(),
            Some(Ok(_)) => "new".to_string(),
            Some(Err(errors)) => errors.to_string(),
        }
    }
}

#[test]
fn a_good_change_is_taken_up_and_a_bad_one_reported_once() {
    let mut site = Site::new();
    let mut watch = site.watch();
    assert_eq!(site.look(&mut watch), "same");
    site.draft.streams.push(stream("more", 1));
    site.write();
    assert_eq!(site.look(&mut watch), "new");
    assert_eq!(watch.running().streams().count(), 2);
    assert_eq!(site.look(&mut watch), "same");

    let good = std::fs::read(site.path()).expect("readable");
    std::fs::write(site.path(), &good[..good.len() / 2]).expect("written");
    let text = site.look(&mut watch);
    assert!(text.contains("catalog.toml"), "{text}");
    assert_eq!(site.look(&mut watch), "same", "reported once");
    assert_eq!(
        watch.running().streams().count(),
        2,
        "the running catalog is kept"
    );

    std::fs::remove_file(site.path()).expect("removed");
    assert!(site.look(&mut watch).contains("cannot be read"));
    assert_eq!(site.look(&mut watch), "same");
    site.draft.streams.push(stream("third", 1));
    site.write();
    assert_eq!(site.look(&mut watch), "new");
    assert_eq!(watch.running().streams().count(), 3);
}

#[test]
fn a_changed_key_set_is_a_change() {
    let mut site = Site::new();
    let mut watch = site.watch();
    site.write_key("k2");
    assert_eq!(site.look(&mut watch), "new");
    assert_eq!(watch.running().tenants()[0].keys[0].kid, "k2");
    std::fs::write(site.dir.path().join("keys.json"), "{\"keys\":[]}").expect("written");
    let text = site.look(&mut watch);
    assert!(
        text.contains("keys.json") && text.contains("no Ed25519"),
        "{text}"
    );
    assert_eq!(watch.running().tenants()[0].keys[0].kid, "k2");
}

#[test]
fn what_would_split_or_lose_a_shard_is_refused() {
    type Change = fn(&mut CatalogDraft);
    let refused: [(Change, &str, &str); 8] = [
        (
            |d| d.assignments[0].generation = Some(4),
            "generation 5 to 4",
            "5 or more",
        ),
        (
            |d| d.assignments[0].leader = "broker-2".into(),
            "from broker-1 to broker-2",
            "generation to 6",
        ),
        (
            |d| d.streams[0].shards = 3,
            "had 2 shards and now has 3",
            "declare a new name",
        ),
        (
            |d| d.streams[0].routing = Some("jump_hash".into()),
            "changes its routing",
            "keep it",
        ),
        (
            |d| d.streams[0].replicas = 2,
            "changes its replicas",
            "raise its generation",
        ),
        (|d| d.assignments.clear(), "generation 5 to 0", "5 or more"),
        (
            |d| {
                d.streams.clear();
                d.assignments.clear();
            },
            "stream t1/ns/s is gone within generation 0",
            "generation to 1",
        ),
        (
            |d| {
                d.streams[0].name = "renamed".into();
                d.assignments.clear();
            },
            "stream t1/ns/s is gone within generation 0",
            "put it back",
        ),
    ];
    for (change, cause, remedy) in refused {
        let mut site = Site::new();
        let mut watch = site.watch();
        change(&mut site.draft);
        site.write();
        let text = site.look(&mut watch);
        assert!(
            text.contains(cause) && text.contains(remedy),
            "{cause}: {text}"
        );
        assert!(text.contains("catalog.toml"), "{text}");
        let running = watch.running().streams().next().expect("a stream").clone();
        assert_eq!(
            (running.shards(), running.assignments[0].generation.0),
            (2, 5)
        );
    }
    let accepted: [Change; 4] = [
        |d| d.assignments[0] = assigned("broker-2", 6),
        |d| {
            d.streams.clear();
            d.generation = 1;
        },
        |d| d.nodes.swap(0, 2),
        |d| d.nodes[0].client = "127.0.0.1:9000".into(),
    ];
    for change in accepted {
        let mut site = Site::new();
        let mut watch = site.watch();
        change(&mut site.draft);
        if site.draft.streams.is_empty() {
            site.draft.assignments.clear();
        }
        site.write();
        assert_eq!(site.look(&mut watch), "new");
    }
}

#[test]
fn a_file_cut_between_two_sections_removes_nothing() {
    let mut site = Site::new();
    site.draft.generation = 7;
    site.draft.assignments.clear();
    site.draft.caches.push(stream("c", 1));
    site.write();
    let mut watch = site.watch();
    let whole = std::fs::read_to_string(site.path()).expect("readable");
    for section in ["[[stream]]", "[[cache]]"] {
        let cut = whole.find(section).expect("a section");
        std::fs::write(site.path(), &whole[..cut]).expect("written");
        let text = site.look(&mut watch);
        assert!(
            text.contains("cache t1/ns/c is gone within generation 7"),
            "{text}"
        );
        assert_eq!(
            text.contains("stream t1/ns/s is gone"),
            section == "[[stream]]",
            "{text}"
        );
        assert_eq!(watch.running().sharded().len(), 2);
    }
    std::fs::write(site.path(), &whole).expect("written");
    assert_eq!(site.look(&mut watch), "new");
}

#[test]
fn a_missing_file_at_start_is_named() {
    let site = Site::new();
    let errors = CatalogFile::load(&site.dir.path().join("none.toml")).expect_err("missing");
    assert!(errors.to_string().contains("none.toml"), "{errors}");
}

#[test]
fn a_file_below_an_accepted_generation_is_refused() {
    let mut site = Site::new();
    let mut watch = site.watch();
    // Shard 1 stands at the file's own generation, which this broker has seen at 3.
    let accepted =
        |shard: &ShardId| (shard.name.as_str() == "s" && shard.shard == 1).then_some(Generation(3));
    let judge = |next: &Catalog| check_accepted(next, &accepted);
    for (generation, taken) in [(0, false), (2, false), (3, true), (4, true)] {
        site.draft.generation = generation;
        site.draft
            .streams
            .push(stream(&format!("at-{generation}"), 1));
        site.write();
        site.now += Duration::from_secs(1);
        match watch.poll(site.now, &judge).expect("a change") {
            Ok(_) => assert!(taken, "{generation}"),
            Err(errors) => {
                let text = errors.to_string();
                assert!(!taken, "{text}");
                assert!(text.contains("shard 1 of stream t1/ns/s"), "{text}");
                assert!(text.contains("has accepted 3"), "{text}");
                assert!(text.contains("generation 4 or more"), "{text}");
                assert_eq!(errors.0.len(), 1, "shard 0 is fine: {text}");
            }
        }
    }
    assert_eq!(watch.running().streams().count(), 5);
}
