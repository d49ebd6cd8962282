//! What is wrong in a file an operator wrote: where, why, and what to do about it.

use std::fmt;
use std::path::{Path, PathBuf};

/// One mistake in one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogError {
    /// The file the mistake is in.
    pub file: PathBuf,
    /// Line, counted from 1, when the mistake has a place.
    pub line: Option<u32>,
    /// What is wrong, with the offending value.
    pub cause: String,
    /// What the operator should do.
    pub remedy: String,
}

impl fmt::Display for CatalogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        write!(f, ": {}; {}", self.cause, self.remedy)
    }
}

impl std::error::Error for CatalogError {}

/// Every mistake found in one run, in the order of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CatalogErrors(pub Vec<CatalogError>);

impl fmt::Display for CatalogErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for CatalogErrors {}

/// Collects mistakes while a file is read, so that one run names them all.
#[derive(Debug)]
pub struct Faults {
    file: PathBuf,
    /// Byte offset of each line's start.
    line_starts: Vec<usize>,
    list: Vec<CatalogError>,
}

impl Faults {
    /// Starts with none; `text` is only used to turn byte offsets into lines.
    pub fn new(file: &Path, text: &str) -> Self {
        let mut line_starts = vec![0];
        line_starts.extend(text.match_indices('\n').map(|(at, _)| at + 1));
        Self {
            file: file.to_path_buf(),
            line_starts,
            list: Vec::new(),
        }
    }

    /// The line, counted from 1, that holds the byte at `offset`.
    pub fn line_of(&self, offset: usize) -> u32 {
        self.line_starts.partition_point(|start| *start <= offset) as u32
    }

    /// Adds a mistake at a line of this file.
    pub fn at(&mut self, line: u32, cause: impl Into<String>, remedy: impl Into<String>) {
        self.push(Some(line), cause.into(), remedy.into());
    }

    /// Adds a mistake of the file as a whole.
    pub fn whole(&mut self, cause: impl Into<String>, remedy: impl Into<String>) {
        self.push(None, cause.into(), remedy.into());
    }

    fn push(&mut self, line: Option<u32>, cause: String, remedy: String) {
        let file = self.file.clone();
        self.list.push(CatalogError {
            file,
            line,
            cause,
            remedy,
        });
    }

    /// True while nothing was found.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The mistakes in the order of the file.
    pub fn into_errors(mut self) -> CatalogErrors {
        self.list.sort_by_key(|error| error.line);
        CatalogErrors(self.list)
    }
}

/// The known name nearest to a mistyped one, when it is near enough to be meant.
pub fn nearest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let allowed = 1 + wrong.chars().count() / 3;
    known
        .into_iter()
        .map(|name| (edit_distance(wrong, name), name))
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// Edits (insert, delete, replace, swap of neighbours) between two names.
fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let replace = above[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            row[j] = replace.min(above[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut above, row);
    }
    above[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_name_is_only_offered_when_near() {
        let known = ["segment-bytes", "commit-max-bytes", "data-dir"];
        assert_eq!(nearest("segmnet-bytes", known), Some("segment-bytes"));
        assert_eq!(nearest("datadir", known), Some("data-dir"));
        assert_eq!(nearest("colour", known), None);
        assert_eq!(edit_distance("ab", "ba"), 1);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
    }

    #[test]
    fn lines_are_counted_from_one() {
        let faults = Faults::new(Path::new("x"), "a\nbc\n\nd");
        let lines: Vec<u32> = [0, 1, 2, 4, 5, 6].map(|at| faults.line_of(at)).to_vec();
        assert_eq!(lines, [1, 1, 2, 2, 3, 4]);
    }
}
