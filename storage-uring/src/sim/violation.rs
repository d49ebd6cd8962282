//! What a broken check says, and how a run of checks that panic is made into a result.
//!
//! A check panics with a text that begins with the number of its invariant: in a test it fails as any
//! assertion does. It knows nothing of what the numbers stand for; `docs/simulation.md` has the list.

use std::any::Any;
use std::fmt;
use std::panic::{catch_unwind, UnwindSafe};

/// A broken invariant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Its number; none for a panic that no check is behind.
    pub invariant: Option<u8>,
    /// What was seen.
    pub seen: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.invariant {
            Some(number) => write!(f, "I{number}: {}", self.seen),
            None => write!(f, "panic: {}", self.seen),
        }
    }
}

/// Panics with an invariant's number and what was seen, unless the condition holds.
macro_rules! holds {
    ($invariant:expr, $condition:expr, $($seen:tt)+) => {
        if !$condition {
            $crate::sim::violation::broken($invariant, format_args!($($seen)+));
        }
    };
}
pub(crate) use holds;

/// Panics with an invariant's number and what was seen.
///
/// # Panics
/// Always.
#[track_caller]
pub fn broken(invariant: u8, seen: fmt::Arguments<'_>) -> ! {
    panic!("I{invariant}: {seen}")
}

/// Runs to the end or to the first broken check.
///
/// # Errors
/// With what was broken.
pub fn caught<T>(run: impl FnOnce() -> T + UnwindSafe) -> Result<T, Violation> {
    catch_unwind(run).map_err(|panic| of_panic(panic.as_ref()))
}

fn of_panic(panic: &(dyn Any + Send)) -> Violation {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&'static str>().copied());
    let text = text.unwrap_or("without a message");
    let numbered = text.strip_prefix('I').and_then(|rest| {
        let (number, seen) = rest.split_once(": ")?;
        Some((number.parse().ok()?, seen))
    });
    let (invariant, seen) = match numbered {
        Some((number, seen)) => (Some(number), seen),
        None => (None, text),
    };
    Violation {
        invariant,
        seen: seen.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_check_is_told_from_any_other_panic() {
        let told = |run: fn()| caught(run).map_err(|violation| violation.to_string());
        assert_eq!(told(|| ()), Ok(()));
        assert_eq!(
            told(|| holds!(5, 1 + 1 == 3, "{} seen: here", 2)),
            Err("I5: 2 seen: here".to_owned())
        );
        assert_eq!(
            told(|| panic!("In: between")),
            Err("panic: In: between".to_owned())
        );
    }
}
