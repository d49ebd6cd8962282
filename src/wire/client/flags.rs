//! The flag word of a client frame: which layout the body has, and with which optional fields.
//!
//! Every bit changes where the bytes of a body are, so nothing here ever masks a bit off: a word
//! either selects exactly one [`Layout`] or is refused.
//!
//! Invariants: `Layout::flags` is the inverse of `Flags::layout`, apart from the pair
//! `EVENT_BATCH | EVENT_BATCH_SHARED`, which readers take as the shared form.

use std::fmt;
use std::ops::BitOr;

/// A flag word that holds defined bits only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Flags(u16);

impl Flags {
    /// No bit: the body is one JSON message.
    pub const JSON: Flags = Flags(0);
    /// Body is a publish batch.
    pub const PUBLISH_BATCH: Flags = Flags(0x0001);
    /// Body is an event batch that names its subscription.
    pub const EVENT_BATCH: Flags = Flags(0x0002);
    /// Body is an event batch that names no subscription.
    pub const EVENT_BATCH_SHARED: Flags = Flags(0x0004);
    /// The publish wants an answer and carries a request id.
    pub const PUBLISH_ACKED: Flags = Flags(0x0008);
    /// Body is the answer to a binary publish.
    pub const PUBLISH_ACK: Flags = Flags(0x0010);
    /// The events carry the offset of the first one.
    pub const EVENT_OFFSETS: Flags = Flags(0x0020);
    /// The publish carries a key.
    pub const PUBLISH_KEYED: Flags = Flags(0x0040);
    /// The answer names the shard's owner.
    pub const ACK_OWNER: Flags = Flags(0x0080);
    /// The publish carries a producer id and a sequence.
    pub const PUBLISH_IDEMPOTENT: Flags = Flags(0x0100);
    /// The failed answer carries a code and a class.
    pub const ACK_CODE: Flags = Flags(0x0200);
    /// The failed answer carries a reason and a delay.
    pub const ACK_DETAIL: Flags = Flags(0x0400);
    /// The events carry the count of offsets skipped before them.
    pub const EVENT_SKIPPED: Flags = Flags(0x0800);
    /// The successful answer carries the offset of the batch's first record.
    pub const ACK_OFFSET: Flags = Flags(0x1000);
    /// The events carry their publisher.
    pub const EVENT_PUBLISHER: Flags = Flags(0x2000);
    /// Each event carries its time.
    pub const EVENT_TIMES: Flags = Flags(0x4000);
    /// Every defined bit.
    pub const ALL: Flags = Flags(0x7FFF);

    const LAYOUTS: Flags = Flags(0x0017);
    const PUBLISH_MODIFIERS: Flags = Flags(0x0148);
    const ACK_MODIFIERS: Flags = Flags(0x1680);
    const EVENT_MODIFIERS: Flags = Flags(0x6820);

    /// Takes a word from the wire; a bit that is not defined is an error.
    pub fn from_bits(bits: u16) -> Result<Flags, FlagsError> {
        if bits & !Self::ALL.0 != 0 {
            return Err(FlagsError::Undefined { bits });
        }
        Ok(Flags(bits))
    }

    /// The word as it stands on the wire.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Whether every bit of `other` is set.
    pub const fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// The bits of both words.
    pub const fn union(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }

    const fn overlaps(self, other: Flags) -> bool {
        self.0 & other.0 != 0
    }

    const fn when(self, condition: bool) -> Flags {
        if condition {
            self
        } else {
            Flags::JSON
        }
    }

    /// The one layout this word selects, or why there is none.
    pub fn layout(self) -> Result<Layout, FlagsError> {
        let bits = self.0;
        let events = Self::EVENT_BATCH | Self::EVENT_BATCH_SHARED;
        match Flags(bits & Self::LAYOUTS.0) {
            Flags::JSON if bits == 0 => Ok(Layout::Json),
            Flags::JSON => Err(FlagsError::NoLayout { bits }),
            Flags::PUBLISH_BATCH => self.publish_layout(),
            Flags::PUBLISH_ACK => self.ack_layout(),
            base if events.contains(base) => self.event_layout(),
            _ => Err(FlagsError::TwoLayouts { bits }),
        }
    }

    fn only_modified_by(self, modifiers: Flags) -> Result<(), FlagsError> {
        if self.0 & !Self::LAYOUTS.0 & !modifiers.0 != 0 {
            return Err(FlagsError::ForeignModifier { bits: self.0 });
        }
        Ok(())
    }

    fn needs(self, modifier: Flags, needed: Flags) -> Result<(), FlagsError> {
        if self.overlaps(modifier) && !self.overlaps(needed) {
            return Err(FlagsError::MissingModifier {
                bits: self.0,
                needed: needed.0,
            });
        }
        Ok(())
    }

    fn publish_layout(self) -> Result<Layout, FlagsError> {
        self.only_modified_by(Self::PUBLISH_MODIFIERS)?;
        self.needs(Self::PUBLISH_IDEMPOTENT, Self::PUBLISH_ACKED)?;
        Ok(Layout::Publish(PublishShape {
            acked: self.overlaps(Self::PUBLISH_ACKED),
            idempotent: self.overlaps(Self::PUBLISH_IDEMPOTENT),
            keyed: self.overlaps(Self::PUBLISH_KEYED),
        }))
    }

    fn ack_layout(self) -> Result<Layout, FlagsError> {
        self.only_modified_by(Self::ACK_MODIFIERS)?;
        self.needs(Self::ACK_DETAIL, Self::ACK_CODE)?;
        if self.overlaps(Self::ACK_OFFSET) && self.overlaps(Self::ACK_CODE) {
            return Err(FlagsError::SuccessAndFailure { bits: self.0 });
        }
        Ok(Layout::Ack(AckShape {
            code: self.overlaps(Self::ACK_CODE),
            detail: self.overlaps(Self::ACK_DETAIL),
            owner: self.overlaps(Self::ACK_OWNER),
            offset: self.overlaps(Self::ACK_OFFSET),
        }))
    }

    fn event_layout(self) -> Result<Layout, FlagsError> {
        self.only_modified_by(Self::EVENT_MODIFIERS)?;
        self.needs(Self::EVENT_SKIPPED, Self::EVENT_OFFSETS)?;
        Ok(Layout::Event(EventShape {
            subscription: !self.overlaps(Self::EVENT_BATCH_SHARED),
            offsets: self.overlaps(Self::EVENT_OFFSETS),
            skipped: self.overlaps(Self::EVENT_SKIPPED),
            publisher: self.overlaps(Self::EVENT_PUBLISHER),
            times: self.overlaps(Self::EVENT_TIMES),
        }))
    }
}

impl BitOr for Flags {
    type Output = Flags;

    fn bitor(self, other: Flags) -> Flags {
        self.union(other)
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Flags({:#06x})", self.0)
    }
}

/// Why a flag word selects no layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FlagsError {
    /// The layout of such a frame cannot be known; the stream ends here.
    #[error("flags {bits:#06x} hold an undefined bit")]
    Undefined { bits: u16 },
    #[error("flags {bits:#06x} only modify a layout and name none")]
    NoLayout { bits: u16 },
    #[error("flags {bits:#06x} name more than one layout")]
    TwoLayouts { bits: u16 },
    #[error("flags {bits:#06x} hold a modifier of another layout")]
    ForeignModifier { bits: u16 },
    #[error("flags {bits:#06x} need {needed:#06x} as well")]
    MissingModifier { bits: u16, needed: u16 },
    #[error("flags {bits:#06x} ask for fields of a success and of a failure")]
    SuccessAndFailure { bits: u16 },
}

/// How the body of a frame is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    Json,
    Publish(PublishShape),
    Ack(AckShape),
    Event(EventShape),
}

impl Layout {
    /// The flag word that selects this layout.
    pub fn flags(self) -> Flags {
        match self {
            Layout::Json => Flags::JSON,
            Layout::Publish(shape) => shape.flags(),
            Layout::Ack(shape) => shape.flags(),
            Layout::Event(shape) => shape.flags(),
        }
    }
}

/// The optional prefixes of a publish batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PublishShape {
    pub acked: bool,
    pub idempotent: bool,
    pub keyed: bool,
}

impl PublishShape {
    /// The flag word that selects this layout.
    pub fn flags(self) -> Flags {
        Flags::PUBLISH_BATCH
            | Flags::PUBLISH_ACKED.when(self.acked)
            | Flags::PUBLISH_IDEMPOTENT.when(self.idempotent)
            | Flags::PUBLISH_KEYED.when(self.keyed)
    }
}

/// The optional fields of a publish ack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AckShape {
    pub code: bool,
    pub detail: bool,
    pub owner: bool,
    pub offset: bool,
}

impl AckShape {
    /// The flag word that selects this layout.
    pub fn flags(self) -> Flags {
        Flags::PUBLISH_ACK
            | Flags::ACK_CODE.when(self.code)
            | Flags::ACK_DETAIL.when(self.detail)
            | Flags::ACK_OWNER.when(self.owner)
            | Flags::ACK_OFFSET.when(self.offset)
    }
}

/// The optional fields of an event batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventShape {
    pub subscription: bool,
    pub offsets: bool,
    pub skipped: bool,
    pub publisher: bool,
    pub times: bool,
}

impl EventShape {
    /// The flag word that selects this layout.
    pub fn flags(self) -> Flags {
        Flags::EVENT_BATCH.when(self.subscription)
            | Flags::EVENT_BATCH_SHARED.when(!self.subscription)
            | Flags::EVENT_OFFSETS.when(self.offsets)
            | Flags::EVENT_SKIPPED.when(self.skipped)
            | Flags::EVENT_PUBLISHER.when(self.publisher)
            | Flags::EVENT_TIMES.when(self.times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_selects_one_layout_or_is_refused() {
        let mut layouts = std::collections::BTreeMap::new();
        for bits in 0..=u16::MAX {
            let flags = match Flags::from_bits(bits) {
                Ok(flags) => flags,
                Err(error) => {
                    assert_eq!(error, FlagsError::Undefined { bits });
                    assert!(bits >= 0x8000);
                    continue;
                }
            };
            assert!(bits < 0x8000);
            let Ok(layout) = flags.layout() else { continue };
            let both = Flags::EVENT_BATCH | Flags::EVENT_BATCH_SHARED;
            if flags.contains(both) {
                assert_eq!(layout.flags().bits(), bits & !Flags::EVENT_BATCH.bits());
            } else {
                assert_eq!(layout.flags(), flags, "{bits:#06x}");
            }
            let kind = match layout {
                Layout::Json => "json",
                Layout::Publish(_) => "publish",
                Layout::Ack(_) => "ack",
                Layout::Event(_) => "event",
            };
            *layouts.entry(kind).or_insert(0) += 1;
        }
        // Publish: 2 * 2 * 2 prefixes less the 2 idempotent ones that are not acked. Ack: owner,
        // times none/code/code+detail/offset. Event: 3 bases, 3 offset forms, publisher, times.
        let expected = [("ack", 8), ("event", 36), ("json", 1), ("publish", 6)];
        assert_eq!(layouts.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_reasons_are_told_apart() {
        let why = |bits| Flags(bits).layout();
        assert_eq!(
            why(0x0008),
            Err(FlagsError::NoLayout { bits: 8 }),
            "a modifier alone"
        );
        assert_eq!(why(0x0011), Err(FlagsError::TwoLayouts { bits: 0x0011 }));
        assert_eq!(
            why(0x0021),
            Err(FlagsError::ForeignModifier { bits: 0x0021 })
        );
        let needed = Flags::PUBLISH_ACKED.bits();
        assert_eq!(
            why(0x0101),
            Err(FlagsError::MissingModifier {
                bits: 0x0101,
                needed
            })
        );
        assert_eq!(
            why(0x1210),
            Err(FlagsError::SuccessAndFailure { bits: 0x1210 })
        );
    }
}
