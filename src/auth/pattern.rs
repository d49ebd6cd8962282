//! The patterns of permissions: `*` stands for any run of bytes, every other byte for itself.

/// A pattern, sorted by shape when it is parsed so that the usual ones match in one compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern {
    text: Box<str>,
    shape: Shape,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// Nothing but stars.
    Any,
    /// No star.
    Exact,
    /// One star, at the end.
    Prefix,
    /// Stars elsewhere.
    General,
}

impl Pattern {
    /// Every text is a pattern.
    pub fn new(text: &str) -> Self {
        let stars = text.bytes().filter(|byte| *byte == b'*').count();
        let shape = if stars == 0 {
            Shape::Exact
        } else if stars == text.len() {
            Shape::Any
        } else if stars == 1 && text.ends_with('*') {
            Shape::Prefix
        } else {
            Shape::General
        };
        Self {
            text: Box::from(text),
            shape,
        }
    }

    /// The pattern as it is written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether the pattern covers all of `resource`.
    pub fn matches(&self, resource: &[u8]) -> bool {
        let text = self.text.as_bytes();
        match self.shape {
            Shape::Any => true,
            Shape::Exact => resource == text,
            Shape::Prefix => resource.starts_with(&text[..text.len() - 1]),
            Shape::General => matches_general(text, resource),
        }
    }

    /// Whether the pattern covers some text that starts with `prefix` and goes on after it.
    pub fn could_match_below(&self, prefix: &[u8]) -> bool {
        // States: the places in the pattern that may be reached after the bytes so far.
        let pattern = self.text.as_bytes();
        let mut reached = vec![false; pattern.len() + 1];
        reached[0] = true;
        step_over_stars(pattern, &mut reached);
        for byte in prefix {
            let mut next = vec![false; pattern.len() + 1];
            for at in 0..pattern.len() {
                if !reached[at] {
                    continue;
                }
                if pattern[at] == b'*' {
                    next[at] = true;
                } else if pattern[at] == *byte {
                    next[at + 1] = true;
                }
            }
            step_over_stars(pattern, &mut next);
            reached = next;
        }
        // Whatever is left of the pattern, be it a letter or a star, covers at least one byte.
        reached[..pattern.len()].contains(&true)
    }
}

/// A star may stand for nothing.
fn step_over_stars(pattern: &[u8], reached: &mut [bool]) {
    for at in 0..pattern.len() {
        if reached[at] && pattern[at] == b'*' {
            reached[at + 1] = true;
        }
    }
}

/// Greedy matching that only ever goes back to the last star: at most
/// `pattern.len() * resource.len()` steps, whatever the pattern.
fn matches_general(pattern: &[u8], resource: &[u8]) -> bool {
    let (mut p, mut r) = (0, 0);
    let mut last_star: Option<(usize, usize)> = None;
    while r < resource.len() {
        if p < pattern.len() && pattern[p] == b'*' {
            last_star = Some((p, r));
            p += 1;
        } else if p < pattern.len() && pattern[p] == resource[r] {
            p += 1;
            r += 1;
        } else if let Some((star, taken)) = last_star {
            // Let the last star take one byte more.
            last_star = Some((star, taken + 1));
            p = star + 1;
            r = taken + 1;
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}
