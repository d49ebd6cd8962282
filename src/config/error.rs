//! What is wrong with a configuration.

use std::fmt;

use crate::catalog::CatalogErrors;
use crate::tls::TlsFault;

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// The setting, variable or file it is about.
    pub key: String,
    /// Its value, hidden when it could be a secret.
    pub value: String,
    /// Where the value comes from.
    pub origin: String,
    /// The rule that is broken.
    pub rule: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.key)?;
        if !self.value.is_empty() {
            write!(f, " = {}", self.value)?;
        }
        if !self.origin.is_empty() {
            write!(f, " ({})", self.origin)?;
        }
        write!(f, ": {}; {}", self.rule, self.remedy)
    }
}

/// Every mistake of a configuration, found in one run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl fmt::Display for ConfigErrors {
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

impl std::error::Error for ConfigErrors {}

/// Text as it may be shown: somebody may have put a key or a token where a path belongs.
pub(super) fn shown(value: &str) -> String {
    let is_token = value.starts_with("eyJ") && value.split('.').count() == 3;
    if value.contains("-----BEGIN") || value.contains("PRIVATE KEY") || is_token {
        return "(hidden: looks like a secret)".to_string();
    }
    if value.chars().count() > 200 {
        return format!("{}...", value.chars().take(200).collect::<String>());
    }
    value.to_string()
}

/// The catalog's own mistakes, each with its file and line.
pub(super) fn from_catalog(errors: CatalogErrors) -> impl Iterator<Item = ConfigError> {
    errors.0.into_iter().map(|error| {
        let line = error
            .line
            .map_or_else(String::new, |line| format!(":{line}"));
        ConfigError {
            key: "catalog".to_string(),
            value: format!("{}{line}", error.file.display()),
            origin: String::new(),
            rule: error.cause,
            remedy: error.remedy,
        }
    })
}

/// A certificate's fault as a mistake of the setting that names the file.
pub(super) fn from_tls(key: &str, fault: TlsFault) -> ConfigError {
    ConfigError {
        key: key.to_string(),
        value: fault.file.display().to_string(),
        origin: String::new(),
        rule: fault.cause,
        remedy: fault.remedy,
    }
}
