//! What the two sides told each other they can do.
//!
//! Invariants: a second feature word counts only with the [`Features::EXTENDED`] marker, and it
//! is sent only to a client that set the marker, only when it is not zero.

use std::fmt;
use std::ops::BitOr;

use super::flags::Flags;
use super::messages::{Answer, Auth, AuthOk, PlainOk};

/// Both feature words: the first in bits 0 to 31, the second in bits 32 to 63.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Features(u64);

macro_rules! features {
    ($($(#[$doc:meta])* $name:ident = $bit:literal;)*) => {
        impl Features {
            $($(#[$doc])* pub const $name: Features = Features(1 << $bit);)*

            const NAMES: &'static [(&'static str, Features)] =
                &[$((stringify!($name), Features::$name)),*];
        }
    };
}

features! {
    /// Serves `topology`.
    TOPOLOGY = 0;
    /// Reads `not_leader`.
    REDIRECT = 1;
    /// Serves `cache_delete`.
    CACHE_DELETE = 2;
    /// Serves consumer groups.
    CONSUMER_GROUP = 3;
    /// Serves a group's dead letters.
    GROUP_DEAD_LETTERS = 4;
    /// Serves `stream_shards`.
    STREAM_SHARDS = 5;
    /// Serves `cache_watch`.
    CACHE_WATCH = 6;
    /// Serves `cache_watch` with current values first.
    CACHE_WATCH_RETAINED = 7;
    /// Serves counters.
    COUNTERS = 8;
    /// Serves idempotent producers; reads `publish_refused`.
    IDEMPOTENT_PRODUCER = 9;
    /// Serves `cache_shards`.
    CACHE_SHARDS = 10;
    /// Reads codes, classes and details of refusals.
    ERROR_CODES = 11;
    /// Reads `shard_moved`.
    SHARD_MOVED = 12;
    /// Answers and reads `unsupported`.
    UNSUPPORTED = 13;
    /// Reads `sequence_reused`.
    SEQUENCE_REUSED = 14;
    /// Answers publishes in order, within a window.
    PUBLISH_PIPELINE = 15;
    /// Serves `commit` and `state_get`.
    ATOMIC_COMMIT = 16;
    /// The publish window is counted per stream.
    STREAM_PUBLISH_WINDOW = 17;
    /// Serves `shard_owners`.
    SHARD_OWNERS = 18;
    /// Publishes are acknowledged after the write.
    ACK_ON_COMMIT = 19;
    /// Group polls name their consumer.
    GROUP_CONSUMER = 20;
    /// Reads `subscription_lagged`.
    SUBSCRIPTION_LAGGED = 21;
    /// Reads `skipped_before` of polled records.
    GROUP_SKIPPED = 22;
    /// Reads `publisher` of polled records.
    GROUP_PUBLISHER = 23;
    /// Serves seek, describe and delete of groups.
    GROUP_ADMIN = 24;
    /// Serves conditional cache writes; reads `version`.
    CACHE_CONDITIONAL = 25;
    /// Serves `offset_for_time`; reads record times.
    RECORD_TIMESTAMPS = 26;
    /// Serves extension and dead-lettering of claims.
    GROUP_CLAIM_CONTROL = 27;
    /// Serves `publish_if`.
    PUBLISH_CONDITIONAL = 28;
    /// Serves `stream_read`.
    STREAM_READ = 29;
    /// Obeys `queue_capacity`.
    SUBSCRIBE_QUEUE = 30;
    /// Marks that the second word is present.
    EXTENDED = 31;
    /// Serves the operator's questions.
    INSPECT = 32;
    /// Reads `stream_deleted`.
    STREAM_DELETED = 33;
    /// Obeys `publish_width`.
    PUBLISH_WIDTH = 34;
    /// Obeys `shard` on publishes.
    EXPLICIT_SHARD = 35;
}

impl Features {
    /// No feature.
    pub const NONE: Features = Features(0);

    /// Joins the two words as they came: a second word without its marker does not count.
    pub fn from_words(low: u32, high: u32) -> Features {
        let low = u64::from(low);
        if low & Self::EXTENDED.0 == 0 {
            return Features(low);
        }
        Features(low | u64::from(high) << 32)
    }

    /// The two words as a peer that set the marker is sent them; the marker goes with a second
    /// word that is not zero.
    pub fn to_words(self) -> (u32, u32) {
        let high = (self.0 >> 32) as u32;
        let low = self.0 as u32 & !(Self::EXTENDED.0 as u32);
        let marker = if high == 0 {
            0
        } else {
            Self::EXTENDED.0 as u32
        };
        (low | marker, high)
    }

    /// Whether every feature of `other` is included.
    pub const fn contains(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }

    /// The features of both.
    pub const fn union(self, other: Features) -> Features {
        Features(self.0 | other.0)
    }

    /// The features without those of `other`.
    pub const fn without(self, other: Features) -> Features {
        Features(self.0 & !other.0)
    }
}

impl BitOr for Features {
    type Output = Features;

    fn bitor(self, other: Features) -> Features {
        self.union(other)
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        let mut set = f.debug_set();
        for (name, feature) in Self::NAMES {
            if self.contains(*feature) {
                set.entry(&format_args!("{name}"));
                rest &= !feature.0;
            }
        }
        if rest != 0 {
            set.entry(&format_args!("{rest:#x}"));
        }
        set.finish()
    }
}

/// The fields that only a client that offered their bit may be sent.
const GATED: Flags = Flags::EVENT_OFFSETS
    .union(Flags::ACK_OWNER)
    .union(Flags::ACK_CODE)
    .union(Flags::ACK_DETAIL)
    .union(Flags::EVENT_SKIPPED)
    .union(Flags::ACK_OFFSET)
    .union(Flags::EVENT_PUBLISHER)
    .union(Flags::EVENT_TIMES);

/// What a client said in `auth`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClientOffer {
    flags: Option<u16>,
    features: Features,
}

impl ClientOffer {
    /// Reads the offer, which is there even when the token is not good.
    pub fn from_auth(auth: &Auth) -> ClientOffer {
        ClientOffer {
            flags: auth.client_flags,
            features: Features::from_words(
                auth.client_features.unwrap_or(0),
                auth.client_features_hi.unwrap_or(0),
            ),
        }
    }

    /// Whether the client negotiates at all; one that does not is answered `ok`.
    pub fn negotiates(&self) -> bool {
        self.flags.is_some()
    }

    /// The features offered.
    pub fn features(&self) -> Features {
        self.features
    }

    /// Whether a frame with all these bits may be sent to this client.
    pub fn may_send(&self, flags: Flags) -> bool {
        let gated = flags.bits() & GATED.bits();
        self.flags.unwrap_or(0) & gated == gated
    }
}

/// What a broker says in `auth_ok`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServerOffer {
    /// Frames the broker reads, and fields it may send.
    pub flags: u16,
    pub features: Features,
    /// Other UDP ports of the same broker.
    pub listener_ports: Vec<u16>,
    /// Granted with [`Features::PUBLISH_PIPELINE`].
    pub publish_window: Option<u32>,
}

impl ServerOffer {
    /// The answer to a client whose token is good.
    pub fn answer(&self, client: &ClientOffer) -> Answer {
        if !client.negotiates() {
            return Answer::PlainOk(PlainOk {});
        }
        let extended = client.features.contains(Features::EXTENDED);
        let (low, high) = if extended {
            self.features.to_words()
        } else {
            Features(self.features.0 & u64::from(u32::MAX)).to_words()
        };
        let pipeline = Features::PUBLISH_PIPELINE;
        let window = self.features.contains(pipeline) && client.features.contains(pipeline);
        Answer::AuthOk(AuthOk {
            server_flags: self.flags,
            server_features: Some(low).filter(|&word| word != 0),
            server_features_hi: Some(high).filter(|&word| word != 0),
            listener_ports: Some(self.listener_ports.clone()).filter(|ports| !ports.is_empty()),
            publish_window: self.publish_window.filter(|_| window),
        })
    }

    /// What a broker said to us.
    pub fn from_auth_ok(ok: &AuthOk) -> ServerOffer {
        ServerOffer {
            flags: ok.server_flags,
            features: Features::from_words(
                ok.server_features.unwrap_or(0),
                ok.server_features_hi.unwrap_or(0),
            ),
            listener_ports: ok.listener_ports.clone().unwrap_or_default(),
            publish_window: ok.publish_window,
        }
    }

    /// Whether the broker reads frames with all these bits.
    pub fn may_send(&self, flags: Flags) -> bool {
        self.flags & flags.bits() == flags.bits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(flags: Option<u16>, low: Option<u32>, high: Option<u32>) -> ClientOffer {
        ClientOffer::from_auth(&Auth {
            tenant_id: "t".into(),
            token: "x".into(),
            client_flags: flags,
            client_features: low,
            client_features_hi: high,
        })
    }

    fn auth_ok(answer: Answer) -> AuthOk {
        match answer {
            Answer::AuthOk(ok) => ok,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_bits_are_those_of_the_protocol() {
        let low: u64 = (0..32).map(|bit| 1u64 << bit).sum();
        let all = Features::NAMES.iter().fold(0, |sum, (_, f)| sum | f.0);
        assert_eq!(all, low | 0xF_0000_0000);
        assert_eq!(Features::COUNTERS.0, 0x100);
        assert_eq!(Features::ACK_ON_COMMIT.0, 0x80000);
        assert_eq!(Features::EXPLICIT_SHARD.0 >> 32, 8);
    }

    #[test]
    fn a_second_word_without_its_marker_does_not_count() {
        let without = offer(Some(0), Some(1), Some(0xF));
        assert!(!without.features().contains(Features::INSPECT));
        let with = offer(Some(0), Some(0x8000_0001), Some(0xF));
        assert!(with.features().contains(Features::EXPLICIT_SHARD));
    }

    #[test]
    fn fields_go_only_to_clients_that_offered_them() {
        let old = offer(None, None, None);
        assert!(old.may_send(Flags::EVENT_BATCH_SHARED));
        assert!(old.may_send(Flags::PUBLISH_ACK));
        for bit in (0..15)
            .map(|bit| 1 << bit)
            .filter(|bit| GATED.bits() & bit != 0)
        {
            let flag = Flags::from_bits(bit).unwrap();
            assert!(!old.may_send(flag), "{flag:?}");
            assert!(offer(Some(bit), None, None).may_send(flag), "{flag:?}");
            assert!(!offer(Some(!bit), None, None).may_send(flag), "{flag:?}");
        }
    }

    #[test]
    fn the_answer_keeps_to_what_the_client_can_read() {
        let server = ServerOffer {
            flags: 0x127D,
            features: Features::COUNTERS | Features::PUBLISH_PIPELINE | Features::EXPLICIT_SHARD,
            listener_ports: vec![],
            publish_window: Some(32),
        };
        let silent = server.answer(&offer(None, Some(u32::MAX), Some(0xF)));
        assert_eq!(silent, Answer::PlainOk(PlainOk {}));

        let first_word_only = auth_ok(server.answer(&offer(Some(7), Some(0x100), None)));
        assert_eq!(first_word_only.server_features, Some(0x8100));
        assert_eq!(first_word_only.server_features_hi, None);
        assert_eq!(first_word_only.publish_window, None);
        assert_eq!(first_word_only.listener_ports, None);

        let full = auth_ok(server.answer(&offer(Some(7), Some(0x8000_8000), Some(1))));
        assert_eq!(full.server_features, Some(0x8000_8100));
        assert_eq!(full.server_features_hi, Some(8));
        assert_eq!(full.publish_window, Some(32));
        assert_eq!(
            ServerOffer::from_auth_ok(&full)
                .features
                .without(Features::EXTENDED),
            server.features
        );

        let plain = ServerOffer {
            features: Features::COUNTERS,
            ..server
        };
        let answer = auth_ok(plain.answer(&offer(Some(7), Some(0x8000_0000), Some(1))));
        assert_eq!(
            answer.server_features,
            Some(0x100),
            "no marker without a second word"
        );
        assert_eq!(answer.server_features_hi, None);
    }
}
