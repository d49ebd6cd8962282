//! The effective configuration, in a form that can be fed back in.

use std::fmt::Write;

use super::args::notes;
use super::error::shown;
use super::model::Config;
use super::read::whole;
use super::settings::{Kind, SETTINGS};

impl Config {
    /// The effective configuration as TOML, each value with its origin. Holds paths of keys,
    /// never keys.
    pub fn print(&self) -> String {
        let mut text = String::new();
        let mut heading = "";
        for setting in SETTINGS {
            if setting.heading != heading {
                heading = setting.heading;
                let gap = if text.is_empty() { "" } else { "\n" };
                let _ = writeln!(text, "{gap}# {heading}");
            }
            let Some(found) = self.values.get(setting.name) else {
                let _ = writeln!(text, "# {} is unset", setting.name);
                continue;
            };
            let value = match setting.kind {
                // As TOML writes numbers: without a sign or leading zeros.
                Kind::Whole(..) => whole(&found.text)
                    .map_or_else(|| shown(&found.text), |number| number.to_string()),
                Kind::Switch => found.text.trim().to_string(),
                Kind::Text | Kind::Path | Kind::Address | Kind::Choice(_) | Kind::Cores => {
                    toml::Value::String(shown(&found.text)).to_string()
                }
            };
            let origin = found.origin.to_string();
            let origin = origin.replace(char::is_control, " ");
            let _ = writeln!(text, "{} = {value} # {origin}", setting.name);
        }
        text
    }
}

/// The reference of all settings as a Markdown table, for the manual.
pub fn reference() -> String {
    let mut text = String::new();
    let mut heading = "";
    for setting in SETTINGS {
        if setting.heading != heading {
            heading = setting.heading;
            let gap = if text.is_empty() { "" } else { "\n" };
            let _ = writeln!(
                text,
                "{gap}### {heading}\n\n| Setting | Meaning |\n|---|---|"
            );
        }
        let _ = writeln!(
            text,
            "| `{}` | {} {} |",
            setting.name,
            setting.help,
            notes(setting)
        );
    }
    text
}
