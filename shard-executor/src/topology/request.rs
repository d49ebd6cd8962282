//! The value of `--cores`: a number of cores, or the list of CPUs to use.

use std::fmt;
use std::str::FromStr;

/// No machine has more; bounds what a typing error can allocate.
const LARGEST_CPU: usize = 8_191;

/// What was asked for with `--cores LIST|N`.
///
/// A bare number is a count: `4` means any four CPUs. A list has a comma or a dash: `0-3,6`. One
/// given CPU is written as a range: `6-6`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CoreRequest {
    /// So many cores, on CPUs chosen here.
    Count(usize),
    /// Exactly these CPUs, core 0 on the first of them.
    List(Vec<usize>),
}

/// A `--cores` value that means nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoreRequestError {
    /// Not a number, nor a list of numbers and ranges.
    #[error(
        "`{0}` is neither a number of cores (like 4) nor a list of CPUs (like 0-3,6 or 6-6 for \
         one CPU)"
    )]
    Malformed(String),
    /// Zero cores.
    #[error("0 cores cannot serve anything; give a number from 1, or a list of CPUs")]
    Zero,
    /// A range that runs backwards.
    #[error("the range {0}-{1} runs backwards; write {1}-{0}")]
    Backwards(usize, usize),
    /// The same CPU twice: two data cores would share it.
    #[error("CPU {0} is listed twice; each CPU runs one core")]
    Twice(usize),
    /// A CPU number no machine has.
    #[error("CPU {0} is beyond the largest number known, {LARGEST_CPU}")]
    TooLarge(usize),
}

impl FromStr for CoreRequest {
    type Err = CoreRequestError;

    fn from_str(text: &str) -> Result<Self, CoreRequestError> {
        let text = text.trim();
        if text.contains([',', '-']) {
            return parse_cpu_list(text).map(Self::List);
        }
        match parse_number(text, text)? {
            0 => Err(CoreRequestError::Zero),
            count if count > LARGEST_CPU => Err(CoreRequestError::TooLarge(count)),
            count => Ok(Self::Count(count)),
        }
    }
}

impl fmt::Display for CoreRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count}"),
            // A list of one must not read as a count.
            Self::List(cpus) if cpus.len() == 1 => write!(f, "{0}-{0}", cpus[0]),
            Self::List(cpus) => {
                let text: Vec<String> = cpus.iter().map(ToString::to_string).collect();
                f.write_str(&text.join(","))
            }
        }
    }
}

/// Parses `0-3,6` into its CPUs, in the order given. The kernel writes its lists the same way.
///
/// # Errors
/// When the text is no list, or names a CPU twice.
pub fn parse_cpu_list(text: &str) -> Result<Vec<usize>, CoreRequestError> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (parse_number(first, text)?, parse_number(last, text)?),
            None => {
                let only = parse_number(part, text)?;
                (only, only)
            }
        };
        if last > LARGEST_CPU || first > LARGEST_CPU {
            return Err(CoreRequestError::TooLarge(first.max(last)));
        }
        if first > last {
            return Err(CoreRequestError::Backwards(first, last));
        }
        for cpu in first..=last {
            if cpus.contains(&cpu) {
                return Err(CoreRequestError::Twice(cpu));
            }
            cpus.push(cpu);
        }
    }
    Ok(cpus)
}

fn parse_number(part: &str, whole: &str) -> Result<usize, CoreRequestError> {
    let part = part.trim();
    // `parse` alone would take a leading plus sign.
    if part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()) {
        return Err(CoreRequestError::Malformed(whole.to_owned()));
    }
    part.parse()
        .map_err(|_| CoreRequestError::Malformed(whole.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_and_lists() {
        assert_eq!("4".parse(), Ok(CoreRequest::Count(4)));
        assert_eq!(" 1 ".parse(), Ok(CoreRequest::Count(1)));
        assert_eq!("0-3,6".parse(), Ok(CoreRequest::List(vec![0, 1, 2, 3, 6])));
        assert_eq!("6-6".parse(), Ok(CoreRequest::List(vec![6])));
        assert_eq!(
            "5,1".parse(),
            Ok(CoreRequest::List(vec![5, 1])),
            "order is kept"
        );
    }

    #[test]
    fn errors_name_the_mistake() {
        let parse = |text: &str| text.parse::<CoreRequest>();
        assert_eq!(parse("0"), Err(CoreRequestError::Zero));
        assert_eq!(parse("3-1"), Err(CoreRequestError::Backwards(3, 1)));
        assert_eq!(parse("0-2,1"), Err(CoreRequestError::Twice(1)));
        assert_eq!(parse("0,999999"), Err(CoreRequestError::TooLarge(999_999)));
        assert_eq!(
            parse("0-99999999999"),
            Err(CoreRequestError::TooLarge(99_999_999_999))
        );
        for text in [
            "",
            "-1",
            "1-",
            "a",
            "1,,2",
            "1,",
            "+4",
            "4.0",
            "0x3",
            "99999999999999999999",
        ] {
            assert_eq!(
                parse(text),
                Err(CoreRequestError::Malformed(text.into())),
                "{text:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn printed_requests_parse_to_themselves(
            count in 1..LARGEST_CPU,
            cpus in prop::collection::hash_set(0..LARGEST_CPU, 1..20),
        ) {
            for request in [CoreRequest::Count(count), CoreRequest::List(cpus.into_iter().collect())] {
                prop_assert_eq!(request.to_string().parse(), Ok(request));
            }
        }

        #[test]
        fn no_text_panics(text in "[0-9,\\- a]{0,12}") {
            let _ = text.parse::<CoreRequest>();
        }
    }
}
