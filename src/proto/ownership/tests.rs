//! Ownership over the full input space.

use super::*;

fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

const SERVING: [Serving; 5] = [
    Serving::Ready,
    Serving::Opening,
    Serving::Fenced,
    Serving::LeaseLapsed,
    Serving::StorageFailed,
];
const VERDICTS: [CredentialVerdict; 4] = [
    CredentialVerdict::Allowed,
    CredentialVerdict::Missing,
    CredentialVerdict::Invalid,
    CredentialVerdict::NotAllowed,
];

/// The whole input space against the written order of checks, in its own words.
#[test]
fn forward_admission_follows_the_order_of_checks() {
    let (me, other) = (node("me"), node("other"));
    for owner in [Owner::Me, Owner::Other { node: &other }, Owner::Nobody] {
        for serving in SERVING {
            for requested in 4..=6 {
                for load in [Load::Normal, Load::Shedding] {
                    for verdict in VERDICTS {
                        let view = ShardView {
                            owner,
                            generation: Generation(5),
                            serving,
                        };
                        let mut asked = false;
                        let got =
                            admit_forward(&me, Some(view), Generation(requested), load, || {
                                asked = true;
                                verdict
                            });
                        let expected = expected_forward(view, requested, load, verdict);
                        assert_eq!(summary(&got), expected, "{view:?} g{requested} {load:?}");
                        let last_check = requested == 5
                            && owner == Owner::Me
                            && serving == Serving::Ready
                            && load == Load::Normal;
                        assert_eq!(asked, last_check, "OWN-2");
                    }
                }
            }
        }
    }
}

fn expected_forward(
    view: ShardView<'_>,
    requested: u64,
    load: Load,
    verdict: CredentialVerdict,
) -> String {
    let text = match (requested, view.owner) {
        (6, _) => "StaleRoute",
        (_, Owner::Nobody) => "Unavailable",
        (4, Owner::Me) => "not_leader me@5",
        (_, Owner::Other { .. }) => "not_leader other@5",
        (_, Owner::Me) => match view.serving {
            Serving::StorageFailed => "StorageFailed",
            Serving::Opening | Serving::Fenced | Serving::LeaseLapsed => "Unavailable",
            Serving::Ready => match (load, verdict) {
                (Load::Shedding, _) => "Overload",
                (Load::Normal, CredentialVerdict::Allowed) => "serve",
                (Load::Normal, _) => "Unauthorized",
            },
        },
    };
    text.to_string()
}

fn summary(admission: &ForwardAdmission) -> String {
    match admission {
        ForwardAdmission::Serve => "serve".to_string(),
        ForwardAdmission::NotLeader(t) => format!("not_leader {}@{}", t.node, t.generation),
        ForwardAdmission::Refuse { code, .. } => format!("{code:?}"),
    }
}

#[test]
fn unknown_shard_is_a_stale_route() {
    let got = admit_forward(&node("me"), None, Generation(0), Load::Shedding, || {
        panic!("credential must not be looked at")
    });
    assert_eq!(summary(&got), "StaleRoute");
}

#[test]
fn local_routes() {
    let other = node("other");
    let view = |owner, serving| {
        Some(ShardView {
            owner,
            generation: Generation(3),
            serving,
        })
    };
    let mine = |serving| view(Owner::Me, serving);
    let refused = LocalRoute::Refuse;
    assert_eq!(
        route_local(None, Load::Normal, false),
        refused(RouteRefusal::Forbidden),
        "permission before existence"
    );
    assert_eq!(
        route_local(None, Load::Normal, true),
        refused(RouteRefusal::NotFound)
    );
    assert_eq!(
        route_local(mine(Serving::Ready), Load::Normal, true),
        LocalRoute::Serve {
            generation: Generation(3)
        }
    );
    assert_eq!(
        route_local(mine(Serving::Ready), Load::Shedding, true),
        refused(RouteRefusal::Shedding)
    );
    for serving in SERVING.into_iter().skip(1) {
        assert_eq!(
            route_local(mine(serving), Load::Shedding, true),
            refused(RouteRefusal::NotServing(serving))
        );
    }
    assert_eq!(
        route_local(
            view(Owner::Other { node: &other }, Serving::StorageFailed),
            Load::Shedding,
            true
        ),
        LocalRoute::Remote(Target {
            node: other.clone(),
            generation: Generation(3)
        }),
        "another broker's shard does not depend on our own state"
    );
    assert_eq!(
        route_local(view(Owner::Nobody, Serving::Ready), Load::Normal, true),
        refused(RouteRefusal::NotAssigned)
    );
}

#[test]
fn replication_checks_generation_before_membership() {
    let (me, leader, third) = (node("me"), node("leader"), node("third"));
    let set = [leader.clone(), me.clone(), third.clone()];
    let without_me = [leader.clone(), third.clone()];
    let view = |replicas, leads| {
        Some(ReplicaSetView {
            generation: Generation(5),
            leader: Some(leads),
            replicas,
        })
    };
    let check = |sender, view, accepted, requested| {
        check_replication(&me, sender, view, accepted, Generation(requested))
    };
    assert_eq!(check("leader", view(&set, &leader), None, 5), Ok(()));
    for (sender, v, accepted, requested, code) in [
        (
            "leader",
            view(&set, &leader),
            None,
            4,
            PeerCode::FencedEpoch,
        ),
        (
            "leader",
            view(&without_me, &leader),
            None,
            4,
            PeerCode::FencedEpoch,
        ),
        (
            "leader",
            view(&without_me, &leader),
            None,
            6,
            PeerCode::StaleRoute,
        ),
        (
            "leader",
            view(&without_me, &leader),
            None,
            5,
            PeerCode::Unauthorized,
        ),
        (
            "third",
            view(&set, &leader),
            None,
            5,
            PeerCode::Unauthorized,
        ),
        (
            "stranger",
            view(&set, &leader),
            None,
            5,
            PeerCode::Unauthorized,
        ),
        ("me", view(&set, &me), None, 5, PeerCode::Unauthorized),
        (
            "leader",
            view(&set, &leader),
            Some(Generation(7)),
            6,
            PeerCode::FencedEpoch,
        ),
        (
            "leader",
            view(&set, &leader),
            Some(Generation(7)),
            7,
            PeerCode::StaleRoute,
        ),
        (
            "leader",
            None,
            Some(Generation(7)),
            6,
            PeerCode::FencedEpoch,
        ),
        ("leader", None, Some(Generation(7)), 7, PeerCode::StaleRoute),
        ("leader", None, None, 0, PeerCode::StaleRoute),
    ] {
        assert_eq!(
            check(sender, v, accepted, requested),
            Err(code),
            "{sender} {accepted:?} {requested}"
        );
    }
}

#[test]
fn empty_names_are_named() {
    assert!(names_are_complete("t", "n", "s").is_ok());
    assert_eq!(names_are_complete("", "", ""), Err("tenant is empty"));
    assert_eq!(names_are_complete("t", "", ""), Err("namespace is empty"));
    assert!(names_are_complete("t", "n", "").is_err());
}
