//! Reading one TOML table key by key: right type, known keys, and a line for every mistake.
//!
//! Serde stops at the first mistake; an operator wants all of them at once. So the parsed table
//! is taken apart here, and what was not taken at the end is an unknown key.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use toml::de::{DeTable, DeValue};
use toml::Spanned;

use super::fault::{nearest, Faults};

/// A value and the line it stands on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located<T> {
    /// The value.
    pub value: T,
    /// Its line, counted from 1.
    pub line: u32,
}

/// One table being read.
#[derive(Debug)]
pub struct Section<'t, 'i> {
    /// What the operator calls it: `[[stream]]`.
    title: &'static str,
    /// The line the table starts on.
    pub line: u32,
    table: &'t DeTable<'i>,
    known: Vec<&'static str>,
}

impl<'t, 'i> Section<'t, 'i> {
    /// Starts reading `table`, which begins at `line`.
    pub fn new(title: &'static str, line: u32, table: &'t DeTable<'i>) -> Self {
        Self {
            title,
            line,
            table,
            known: Vec::new(),
        }
    }

    fn get(&mut self, key: &'static str) -> Option<&'t Spanned<DeValue<'i>>> {
        self.known.push(key);
        self.table.get(key)
    }

    fn wrong_type(&self, faults: &mut Faults, line: u32, key: &str, value: &DeValue, want: &str) {
        faults.at(
            line,
            format!("{} {key} is {}", self.title, value.type_str()),
            format!("write {want}"),
        );
    }

    /// Reports that a required key is missing.
    pub fn missing(&self, faults: &mut Faults, key: &str, example: &str) {
        faults.at(
            self.line,
            format!("{} has no {key}", self.title),
            format!("add `{key} = {example}`"),
        );
    }

    /// A string, when the key is there.
    pub fn text(&mut self, faults: &mut Faults, key: &'static str) -> Option<Located<&'t str>> {
        let found = self.get(key)?;
        let line = faults.line_of(found.span().start);
        match found.get_ref().as_str() {
            Some(value) => Some(Located { value, line }),
            None => {
                self.wrong_type(faults, line, key, found.get_ref(), "text in quotes");
                None
            }
        }
    }

    /// A string that must be there.
    pub fn required_text(
        &mut self,
        faults: &mut Faults,
        key: &'static str,
        example: &str,
    ) -> Option<Located<&'t str>> {
        if !self.table.contains_key(key) {
            self.known.push(key);
            self.missing(faults, key, example);
            return None;
        }
        self.text(faults, key)
    }

    /// A whole number inside `range`, when the key is there.
    pub fn number(
        &mut self,
        faults: &mut Faults,
        key: &'static str,
        range: RangeInclusive<u64>,
    ) -> Option<Located<u64>> {
        let found = self.get(key)?;
        let line = faults.line_of(found.span().start);
        let Some(integer) = found.get_ref().as_integer() else {
            self.wrong_type(faults, line, key, found.get_ref(), "a whole number");
            return None;
        };
        let digits = integer.as_str();
        let parsed = u64::from_str_radix(digits, integer.radix()).ok();
        match parsed.filter(|value| range.contains(value)) {
            Some(value) => Some(Located { value, line }),
            None => {
                let (low, high) = (range.start(), range.end());
                faults.at(
                    line,
                    format!("{} {key} is {digits}", self.title),
                    format!("use a whole number from {low} to {high}"),
                );
                None
            }
        }
    }

    /// `true` or `false`, when the key is there.
    pub fn flag(&mut self, faults: &mut Faults, key: &'static str) -> Option<Located<bool>> {
        let found = self.get(key)?;
        let line = faults.line_of(found.span().start);
        match found.get_ref().as_bool() {
            Some(value) => Some(Located { value, line }),
            None => {
                self.wrong_type(faults, line, key, found.get_ref(), "true or false");
                None
            }
        }
    }

    /// A list of strings, when the key is there. One bad element is one mistake.
    pub fn text_list(
        &mut self,
        faults: &mut Faults,
        key: &'static str,
    ) -> Option<Vec<Located<&'t str>>> {
        let found = self.get(key)?;
        let line = faults.line_of(found.span().start);
        let Some(array) = found.get_ref().as_array() else {
            self.wrong_type(faults, line, key, found.get_ref(), "a list: [\"a\", \"b\"]");
            return None;
        };
        let mut list = Vec::with_capacity(array.len());
        for element in array.iter() {
            let line = faults.line_of(element.span().start);
            match element.get_ref().as_str() {
                Some(value) => list.push(Located { value, line }),
                None => self.wrong_type(faults, line, key, element.get_ref(), "text in quotes"),
            }
        }
        Some(list)
    }

    /// The tables of `[[key]]`, none when the key is absent.
    pub fn tables(
        &mut self,
        faults: &mut Faults,
        key: &'static str,
        title: &'static str,
    ) -> Vec<Section<'t, 'i>> {
        let Some(found) = self.get(key) else {
            return Vec::new();
        };
        let line = faults.line_of(found.span().start);
        let want = format!("tables that start with {title}");
        let Some(array) = found.get_ref().as_array() else {
            self.wrong_type(faults, line, key, found.get_ref(), &want);
            return Vec::new();
        };
        let mut sections = Vec::with_capacity(array.len());
        for element in array.iter() {
            let line = faults.line_of(element.span().start);
            match element.get_ref().as_table() {
                Some(table) => sections.push(Section::new(title, line, table)),
                None => self.wrong_type(faults, line, key, element.get_ref(), &want),
            }
        }
        sections
    }

    /// Ends the reading: every key nobody asked for is a mistake.
    pub fn finish(self, faults: &mut Faults) {
        let known: HashSet<&str> = self.known.iter().copied().collect();
        for key in self.table.keys() {
            let name: &str = key.get_ref();
            if known.contains(name) {
                continue;
            }
            let remedy = match nearest(name, self.known.iter().copied()) {
                Some(near) => format!("did you mean {near}?"),
                None => format!("known keys are {}", self.known.join(", ")),
            };
            let line = faults.line_of(key.span().start);
            faults.at(
                line,
                format!("{} has an unknown key {name:?}", self.title),
                remedy,
            );
        }
    }
}
