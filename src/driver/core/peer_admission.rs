//! How many connections the holder of one certificate may have open to a core.
//!
//! The bound of all peers together is the endpoint's: it refuses before the handshake. This one can be
//! kept only once the certificate is known, and keeps one broker that dials without end from taking every
//! place. Without peer certificates nobody can be told apart, and only the first holds.

use std::collections::HashMap;
use std::sync::Arc;

/// Who a connection counts for: the names of its certificate.
pub(super) type Holder = Arc<str>;

/// Connections by their holder.
#[derive(Debug)]
pub(super) struct PeerAdmission {
    most_of_one: usize,
    open: HashMap<Holder, usize>,
}

impl PeerAdmission {
    /// `most_of_one` connections of one holder.
    pub fn new(most_of_one: usize) -> Self {
        Self {
            most_of_one,
            open: HashMap::new(),
        }
    }

    /// Counts a connection of the holder of these names in; `None` when it has too many.
    pub fn admit(&mut self, names: &[String]) -> Option<Holder> {
        let names = names.join(",");
        let (holder, open) = match self.open.get_key_value(names.as_str()) {
            Some((holder, open)) => (Arc::clone(holder), *open),
            None => (Holder::from(names), 0),
        };
        if open >= self.most_of_one {
            return None;
        }
        self.open.insert(Arc::clone(&holder), open + 1);
        Some(holder)
    }

    /// One of its connections is over.
    pub fn leave(&mut self, holder: &Holder) {
        if let Some(open) = self.open.get_mut(holder) {
            *open -= 1;
            if *open == 0 {
                self.open.remove(holder);
            }
        }
    }

    /// The holders with most connections first, `most` of them at most.
    pub fn largest(&self, most: usize) -> Vec<(Holder, usize)> {
        let mut all: Vec<_> = self.open.iter().map(|(h, n)| (Arc::clone(h), *n)).collect();
        all.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        all.truncate(most);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(name: &str) -> Vec<String> {
        vec![name.to_string()]
    }

    #[test]
    fn each_holder_has_its_own_bound_and_gets_its_places_back() {
        let mut admission = PeerAdmission::new(2);
        let first = admission.admit(&names("node-1")).expect("room");
        let second = admission.admit(&names("node-1")).expect("room");
        assert_eq!(admission.admit(&names("node-1")), None);
        let other = admission.admit(&names("node-2")).expect("room of its own");
        assert_eq!(
            admission.largest(8),
            [(first.clone(), 2), (other.clone(), 1)]
        );
        assert_eq!(admission.largest(1).len(), 1);
        admission.leave(&second);
        assert!(admission.admit(&names("node-1")).is_some());
        for holder in [&first, &first, &other] {
            admission.leave(holder);
        }
        assert!(
            admission.open.is_empty(),
            "nothing is kept of those that left"
        );
    }
}
