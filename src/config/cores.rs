//! The value of `cores`: a number, or the list of CPUs.

use std::fmt;
use std::str::FromStr;

/// No machine has more CPUs.
const MAX_CPU: usize = 8_191;
/// Most data cores of one broker.
const MAX_CORES: usize = 1_024;

/// Which cores carry data. Read and written the same way as the executor's own `CoreRequest`;
/// it exists apart so that a configuration can be checked where no executor is compiled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CoreSelection {
    /// So many, on CPUs the broker chooses.
    Count(usize),
    /// Exactly these CPUs.
    List(Vec<usize>),
}

/// Why text selects no cores.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CoreSelectionError {
    /// Neither a number nor a list.
    #[error("must be a number of cores or a list of CPUs")]
    Malformed,
    /// No core, or more than a broker can have.
    #[error("must be 1 to {MAX_CORES} cores")]
    Count,
    /// A range that runs backwards.
    #[error("has the range {0}-{1}, which runs backwards")]
    Backwards(usize, usize),
    /// A CPU twice.
    #[error("lists CPU {0} twice")]
    Twice(usize),
    /// A CPU beyond the largest.
    #[error("lists a CPU above {MAX_CPU}")]
    TooLarge,
}

impl CoreSelection {
    /// How many data cores there are.
    pub fn count(&self) -> usize {
        match self {
            Self::Count(count) => *count,
            Self::List(cpus) => cpus.len(),
        }
    }
}

fn number(text: &str) -> Result<usize, CoreSelectionError> {
    let text = text.trim();
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(CoreSelectionError::Malformed);
    }
    text.parse().map_err(|_| CoreSelectionError::TooLarge)
}

impl FromStr for CoreSelection {
    type Err = CoreSelectionError;

    fn from_str(text: &str) -> Result<Self, CoreSelectionError> {
        let text = text.trim();
        if !text.contains([',', '-']) {
            let count = number(text)?;
            let fits = (1..=MAX_CORES).contains(&count);
            return fits
                .then_some(Self::Count(count))
                .ok_or(CoreSelectionError::Count);
        }
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first.max(last) > MAX_CPU {
                return Err(CoreSelectionError::TooLarge);
            }
            if first > last {
                return Err(CoreSelectionError::Backwards(first, last));
            }
            for cpu in first..=last {
                if cpus.contains(&cpu) {
                    return Err(CoreSelectionError::Twice(cpu));
                }
                cpus.push(cpu);
            }
        }
        if cpus.len() > MAX_CORES {
            return Err(CoreSelectionError::Count);
        }
        Ok(Self::List(cpus))
    }
}

impl fmt::Display for CoreSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count}"),
            // One CPU must not read as a count.
            Self::List(cpus) if cpus.len() == 1 => write!(f, "{0}-{0}", cpus[0]),
            Self::List(cpus) => {
                let list: Vec<String> = cpus.iter().map(ToString::to_string).collect();
                f.write_str(&list.join(","))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_lists() {
        let parse = |text: &str| text.parse::<CoreSelection>();
        assert_eq!(parse("4"), Ok(CoreSelection::Count(4)));
        assert_eq!(parse("0-2,6"), Ok(CoreSelection::List(vec![0, 1, 2, 6])));
        for text in ["4", "6-6", "5,1"] {
            assert_eq!(
                parse(text).map(|cores| cores.to_string()),
                Ok(text.to_string())
            );
        }
        assert_eq!(parse("0"), Err(CoreSelectionError::Count));
        assert_eq!(parse("5000"), Err(CoreSelectionError::Count));
        assert_eq!(parse("3-1"), Err(CoreSelectionError::Backwards(3, 1)));
        assert_eq!(parse("1,0-2"), Err(CoreSelectionError::Twice(1)));
        assert_eq!(parse("1-9000"), Err(CoreSelectionError::TooLarge));
        for text in ["", "x", "1,", "+1", "-1", "1-", "99999999999999999999x"] {
            assert_eq!(parse(text), Err(CoreSelectionError::Malformed), "{text}");
        }
    }
}
