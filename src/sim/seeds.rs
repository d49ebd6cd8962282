//! Seeds that once failed, with the reason; they run before all others.

/// The file, built in: one seed a line, `seed reason`, `#` begins a comment.
const FILE: &str = include_str!("../../seeds.txt");

/// A seed and why it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptSeed {
    pub seed: u64,
    pub reason: &'static str,
}

/// The kept seeds, in the order of the file. `Err` names a line that is not one.
pub fn kept_seeds() -> Result<Vec<KeptSeed>, String> {
    parse(FILE)
}

fn parse(text: &'static str) -> Result<Vec<KeptSeed>, String> {
    let lines = text.lines().enumerate();
    lines
        .map(|(number, line)| (number + 1, line.trim()))
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(number, line)| {
            let (seed, reason) = line
                .split_once(' ')
                .ok_or_else(|| format!("seeds.txt line {number}: no reason"))?;
            let seed = seed
                .parse()
                .map_err(|_| format!("seeds.txt line {number}: {seed:?} is not a seed"))?;
            Ok(KeptSeed {
                seed,
                reason: reason.trim(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kept_seed_has_a_reason() {
        assert!(kept_seeds().is_ok());
        assert_eq!(
            parse("# c\n\n7 why it failed\n").unwrap(),
            [KeptSeed {
                seed: 7,
                reason: "why it failed"
            }]
        );
        assert!(parse("7\n").is_err());
        assert!(parse("x why\n").is_err());
    }
}
