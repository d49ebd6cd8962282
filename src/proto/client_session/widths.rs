//! The widths a client says it routed its keyed publishes by.
//!
//! Invariant: a keyed publish that comes under a declared width is taken only when the stream has that
//! width and routes that way; a declaration holds until the next one of the same stream.

use std::collections::HashMap;

use crate::wire::routing::Routing;

/// Streams one client stream may declare widths of.
pub const MAX_DECLARED_WIDTHS: usize = 4096;

/// How many shards a stream has, and how keys choose one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Width {
    pub shards: u32,
    pub routing: Routing,
}

/// What one client stream has declared.
#[derive(Debug, Default)]
pub struct DeclaredWidths {
    /// By namespace, then by stream: a publish looks up without making a key of both.
    by_namespace: HashMap<String, HashMap<String, Width>>,
    count: usize,
}

/// There are [`MAX_DECLARED_WIDTHS`] already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("widths of more than {MAX_DECLARED_WIDTHS} streams were declared on one client stream")]
pub struct TooManyWidths;

impl DeclaredWidths {
    /// Keyed publishes to this stream that follow were routed by `width`.
    pub fn declare(
        &mut self,
        namespace: &str,
        stream: &str,
        width: Width,
    ) -> Result<(), TooManyWidths> {
        let known = self.by_namespace.get_mut(namespace);
        if let Some(declared) = known.and_then(|streams| streams.get_mut(stream)) {
            *declared = width;
            return Ok(());
        }
        if self.count >= MAX_DECLARED_WIDTHS {
            return Err(TooManyWidths);
        }
        self.count += 1;
        let streams = self.by_namespace.entry(namespace.to_owned()).or_default();
        streams.insert(stream.to_owned(), width);
        Ok(())
    }

    /// Whether a keyed publish may be taken by a stream of this width.
    pub fn agrees(&self, namespace: &str, stream: &str, width: Width) -> bool {
        let streams = self.by_namespace.get(namespace);
        let declared = streams.and_then(|streams| streams.get(stream));
        declared.is_none_or(|declared| {
            // With one shard every rule chooses it.
            declared.shards == width.shards
                && (width.shards <= 1 || declared.routing == width.routing)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn width(shards: u32, routing: Routing) -> Width {
        Width { shards, routing }
    }

    #[test]
    fn only_a_declared_width_that_differs_is_stale() {
        let mut widths = DeclaredWidths::default();
        let four = width(4, Routing::Modulo);
        assert!(widths.agrees("n", "s", four), "nothing was declared");
        widths.declare("n", "s", four).unwrap();
        assert!(widths.agrees("n", "s", four));
        assert!(!widths.agrees("n", "s", width(5, Routing::Modulo)));
        assert!(!widths.agrees("n", "s", width(4, Routing::JumpHash)));
        assert!(widths.agrees("n", "other", width(5, Routing::Modulo)));
        assert!(widths.agrees("m", "s", width(5, Routing::Modulo)));
        widths.declare("n", "s", width(5, Routing::Modulo)).unwrap();
        assert!(
            widths.agrees("n", "s", width(5, Routing::Modulo)),
            "the last one holds"
        );
        widths
            .declare("n", "one", width(1, Routing::Modulo))
            .unwrap();
        assert!(widths.agrees("n", "one", width(1, Routing::JumpHash)));
    }

    #[test]
    fn what_is_declared_is_bounded() {
        let mut widths = DeclaredWidths::default();
        let one = width(1, Routing::Modulo);
        for n in 0..MAX_DECLARED_WIDTHS {
            widths.declare("n", &n.to_string(), one).unwrap();
        }
        assert_eq!(widths.declare("n", "more", one), Err(TooManyWidths));
        assert_eq!(widths.declare("n", "7", width(2, Routing::Modulo)), Ok(()));
        assert!(!widths.agrees("n", "7", one));
    }
}
