//! The checks every request passes allocate nothing: finding the stream, the remembered token,
//! the permission.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use felix_uring::auth::{mint, Action, MintRequest, Resource, SigningKey, Verifier};
use felix_uring::catalog::{parse_catalog, RouteTable};
use felix_uring::ids::NodeId;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts what this thread allocates.
struct Counting;

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are those `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those `System` asks for.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    work();
    ALLOCATIONS.with(Cell::get) - before
}

#[test]
fn lookups_and_repeated_checks_do_not_allocate() {
    let key = SigningKey::generate().expect("random bytes");
    let text = format!(
        "[[node]]\nid = \"a\"\nclient = \"127.0.0.1:1\"\ninternal = \"127.0.0.1:2\"\n\
         [[tenant]]\nid = \"t1\"\n[[tenant.key]]\nkid = \"k1\"\nx = \"{}\"\n\
         [[stream]]\ntenant = \"t1\"\nnamespace = \"ns\"\nname = \"orders\"\n",
        key.x()
    );
    let parsed = parse_catalog(Path::new("c.toml"), &text, &mut |_| unreachable!());
    let catalog = Arc::new(parsed.expect("valid"));
    let table = RouteTable::build(&catalog, &NodeId::new("a").expect("a name"), 2);
    let mut verifier = Verifier::new(&catalog, 64);
    let request = MintRequest {
        tenant: "t1".into(),
        sub: "p".into(),
        iat: 1,
        exp: 100,
        nbf: None,
        kid: None,
        perms: vec!["stream.publish:stream:t1/*/orders".into()],
    };
    let token = mint(&request, &key).expect("minted");
    let grant = verifier.verify(&token, "t1", 10).expect("verifies");
    let resource = Resource::Stream {
        tenant: "t1",
        namespace: "ns",
        stream: "orders",
    };
    assert_eq!(allocations(|| drop(Box::new(7))), 1, "the counter counts");
    let counted = allocations(|| {
        for _ in 0..10 {
            assert!(table.stream("t1", "ns", "orders").is_some());
            assert!(table.cache("t1", "ns", "orders").is_none());
            assert!(verifier.verify(&token, "t1", 10).is_ok());
            assert!(grant.allows(Action::StreamPublish, &resource));
        }
    });
    assert_eq!(counted, 0);
}
