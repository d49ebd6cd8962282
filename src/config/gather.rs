//! Finding the text of every setting: flag over environment over file over default.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use crate::catalog::{nearest, Faults};

use super::args::ServeArgs;
use super::error::{shown, ConfigError};
use super::settings::{Absent, Kind, Setting, SETTINGS};

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// A variable of the environment.
    Environment(String),
    /// A line of the configuration file.
    File(PathBuf, u32),
    /// The table of settings.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("from the command line"),
            Self::Environment(variable) => write!(f, "from {variable}"),
            Self::File(file, line) => write!(f, "from {}:{line}", file.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// The text of one setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub text: String,
    pub origin: Origin,
}

/// The text of every setting that has one.
pub(super) type Values = BTreeMap<&'static str, Found>;

/// Variables that belong to the program as a whole and are read elsewhere.
const OTHER_VARIABLES: [&str; 3] = ["FELIX_CONFIG", "FELIX_LOG", "FELIX_LOG_FORMAT"];

/// Variable with faults of the disk, for tests of whole brokers. A release build does not know it and
/// refuses to start with it, as with every other unknown one.
pub const FAULTS_VARIABLE: Option<&str> = if cfg!(debug_assertions) {
    Some("FELIX_STORAGE_FAULTS")
} else {
    None
};

/// Collects all values, and a mistake for everything unknown.
pub(super) fn gather(
    args: &ServeArgs,
    environment: &[(String, String)],
    errors: &mut Vec<ConfigError>,
) -> Values {
    let mut values = Values::new();
    for setting in SETTINGS {
        if let Absent::Default(text) = setting.absent {
            let (text, origin) = (text.to_string(), Origin::Default);
            values.insert(setting.name, Found { text, origin });
        }
    }
    let variable = |name: &str| environment.iter().find(|(key, _)| key == name);
    let from_environment = variable("FELIX_CONFIG").map(|(_, value)| PathBuf::from(value));
    if let Some(file) = args.config.clone().or(from_environment) {
        read_file(&file, &mut values, errors);
    }
    read_environment(environment, &mut values, errors);
    for (name, text) in &args.given {
        let (text, origin) = (text.clone(), Origin::Flag);
        values.insert(name, Found { text, origin });
    }
    values
}

fn read_environment(
    environment: &[(String, String)],
    values: &mut Values,
    errors: &mut Vec<ConfigError>,
) {
    let variables: Vec<(String, &Setting)> = SETTINGS
        .iter()
        .map(|setting| (setting.variable(), setting))
        .collect();
    for (key, value) in environment {
        let is_other = OTHER_VARIABLES.contains(&key.as_str()) || FAULTS_VARIABLE == Some(key);
        if !key.starts_with("FELIX_") || is_other {
            continue;
        }
        if let Some((_, setting)) = variables.iter().find(|(name, _)| name == key) {
            let (text, origin) = (value.clone(), Origin::Environment(key.clone()));
            values.insert(setting.name, Found { text, origin });
            continue;
        }
        let known = variables
            .iter()
            .map(|(name, _)| name.as_str())
            .chain(OTHER_VARIABLES);
        errors.push(ConfigError {
            key: key.clone(),
            // It could be anything, a token included.
            value: "(not shown)".to_string(),
            origin: "from the environment".to_string(),
            rule: "no setting has this variable".to_string(),
            remedy: match nearest(key, known) {
                Some(near) => format!("did you mean {near}?"),
                None => "unset it; --help lists the variables".to_string(),
            },
        });
    }
}

fn file_error(file: &Path, rule: String, remedy: &str) -> ConfigError {
    ConfigError {
        key: "config".to_string(),
        value: file.display().to_string(),
        origin: String::new(),
        rule,
        remedy: remedy.to_string(),
    }
}

fn read_file(file: &Path, values: &mut Values, errors: &mut Vec<ConfigError>) {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => {
            let rule = format!("the configuration file cannot be read: {error}");
            errors.push(file_error(file, rule, "name a readable TOML file"));
            return;
        }
    };
    let lines = Faults::new(file, &text);
    let (document, syntax) = DeTable::parse_recoverable(&text);
    for error in &syntax {
        let line = lines.line_of(error.span().map_or(0, |span| span.start));
        let first = error.message().lines().next().unwrap_or("bad syntax");
        let mut error = file_error(file, format!("is not TOML: {first}"), "correct the syntax");
        error.value = format!("{}:{line}", file.display());
        errors.push(error);
    }
    if !syntax.is_empty() {
        return;
    }
    for (key, value) in document.get_ref() {
        let name: &str = key.get_ref();
        let line = lines.line_of(key.span().start);
        let origin = Origin::File(file.to_path_buf(), line);
        let Some(setting) = Setting::find(name) else {
            errors.push(unknown_key(name, value.get_ref(), &origin));
            continue;
        };
        match value_text(setting.kind, value.get_ref()) {
            Ok(text) => {
                values.insert(setting.name, Found { text, origin });
            }
            Err(remedy) => errors.push(ConfigError {
                key: name.to_string(),
                value: shown_value(value.get_ref()),
                origin: origin.to_string(),
                rule: format!(
                    "a value of this kind is expected, not {}",
                    value.get_ref().type_str()
                ),
                remedy: remedy.to_string(),
            }),
        }
    }
}

fn unknown_key(name: &str, value: &DeValue, origin: &Origin) -> ConfigError {
    let dashed = name.replace('_', "-").to_ascii_lowercase();
    let known = SETTINGS.iter().map(|setting| setting.name);
    ConfigError {
        key: name.to_string(),
        value: shown_value(value),
        origin: origin.to_string(),
        rule: "no setting has this name".to_string(),
        remedy: match nearest(&dashed, known) {
            Some(near) => format!("did you mean {near}?"),
            None => "remove it; --help lists the settings".to_string(),
        },
    }
}

fn shown_value(value: &DeValue) -> String {
    match value {
        DeValue::String(text) => shown(text),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Boolean(flag) => flag.to_string(),
        DeValue::Float(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => {
            format!("({})", value.type_str())
        }
    }
}

/// The value as the command line would spell it, or how to write it instead.
fn value_text(kind: Kind, value: &DeValue) -> Result<String, &'static str> {
    match (kind, value) {
        (Kind::Whole(..) | Kind::Cores, DeValue::Integer(number)) => {
            let parsed = i128::from_str_radix(number.as_str(), number.radix());
            Ok(parsed.map_or_else(|_| number.to_string(), |number| number.to_string()))
        }
        (Kind::Switch, DeValue::Boolean(flag)) => Ok(flag.to_string()),
        (
            Kind::Text | Kind::Path | Kind::Address | Kind::Choice(_) | Kind::Cores,
            DeValue::String(text),
        ) => Ok(text.to_string()),
        (Kind::Whole(..), _) => Err("write a whole number without quotes"),
        (Kind::Switch, _) => Err("write true or false without quotes"),
        (Kind::Cores, _) => Err("write a number, or a list of CPUs in quotes"),
        (Kind::Text | Kind::Path | Kind::Address | Kind::Choice(_), _) => {
            Err("write text in quotes")
        }
    }
}
