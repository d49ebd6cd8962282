//! Names in a catalog file: where they are wrong, the line is reported.

use crate::ids::NameError;

use super::fault::Faults;
use super::section::Located;

pub(super) fn named<T>(
    faults: &mut Faults,
    text: Option<Located<&str>>,
    make: impl Fn(&str) -> Result<T, NameError>,
) -> Option<T> {
    let text = text?;
    match make(text.value) {
        Ok(name) => Some(name),
        Err(error) => {
            let full = error.to_string();
            let (cause, remedy) = match full.split_once(';').or_else(|| full.split_once(':')) {
                Some((cause, remedy)) => (cause.to_string(), remedy.trim().to_string()),
                None => (full, "use another name".to_string()),
            };
            faults.at(text.line, cause, remedy);
            None
        }
    }
}

/// Names that meet in a permission string must not contain what separates or matches there.
pub(super) fn plain<T>(
    faults: &mut Faults,
    text: Option<Located<&str>>,
    make: impl Fn(&str) -> Result<T, NameError>,
) -> Option<T> {
    if let Some(found) = &text {
        let bad = |c: char| c == '/' || c == '*' || c.is_control();
        if found.value.contains(bad) {
            faults.at(
                found.line,
                format!(
                    "name {:?} contains '/', '*' or a control character",
                    found.value
                ),
                "remove it: permissions are written tenant/namespace/name with * as wildcard",
            );
            return None;
        }
    }
    named(faults, text, make)
}
