//! The flags of `serve`, made from the table of settings.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{value_parser, Arg, ArgAction, ArgMatches, Args, Command, Error, FromArgMatches};

use super::settings::{Absent, Kind, Setting, SETTINGS};

/// What was given on the command line. Values are kept as text and judged together with those
/// from the environment and the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServeArgs {
    /// The configuration file.
    pub config: Option<PathBuf>,
    /// Check everything, start nothing.
    pub check_config: bool,
    /// Print the effective configuration, start nothing.
    pub print_config: bool,
    /// Settings given as flags, by name.
    pub given: BTreeMap<&'static str, String>,
}

impl ServeArgs {
    /// The same as giving `--name value`. False when there is no such setting.
    pub fn set(&mut self, name: &str, value: impl Into<String>) -> bool {
        let Some(setting) = Setting::find(name) else {
            return false;
        };
        self.given.insert(setting.name, value.into());
        true
    }
}

/// `[default: 1] [from 1 to 4] [env: FELIX_X]`
pub(super) fn notes(setting: &Setting) -> String {
    let mut notes = Vec::new();
    match setting.absent {
        Absent::Required(example) => notes.push(format!("required, for example {example}")),
        Absent::Unset => {}
        Absent::Default(value) => notes.push(format!("default: {value}")),
    }
    match setting.kind {
        Kind::Whole(min, max) => notes.push(format!("from {min} to {max}")),
        Kind::Choice(words) => notes.push(words.join(" or ")),
        Kind::Text | Kind::Path | Kind::Address | Kind::Switch | Kind::Cores => {}
    }
    notes.push(format!("env: {}", setting.variable()));
    notes
        .iter()
        .map(|note| format!("[{note}]"))
        .collect::<Vec<_>>()
        .join(" ")
}

fn value_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Text => "NAME",
        Kind::Path => "PATH",
        Kind::Address => "ADDR:PORT",
        Kind::Whole(..) => "N",
        Kind::Switch => "BOOL",
        Kind::Choice(_) => "WORD",
        Kind::Cores => "LIST|N",
    }
}

fn flag(setting: &'static Setting) -> Arg {
    let arg = Arg::new(setting.name)
        .long(setting.name)
        .value_name(value_name(setting.kind))
        .help(format!("{} {}", setting.help, notes(setting)))
        .help_heading(setting.heading)
        .action(ArgAction::Set)
        .value_parser(value_parser!(String));
    match setting.kind {
        Kind::Switch => arg
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true"),
        Kind::Text
        | Kind::Path
        | Kind::Address
        | Kind::Whole(..)
        | Kind::Choice(_)
        | Kind::Cores => arg,
    }
}

impl Args for ServeArgs {
    fn augment_args(command: Command) -> Command {
        let config = Arg::new("config")
            .long("config")
            .value_name("FILE")
            .help("Configuration file (TOML; keys are the flags' names) [env: FELIX_CONFIG]")
            .value_parser(value_parser!(PathBuf));
        let check = Arg::new("check-config")
            .long("check-config")
            .help("Check the configuration, the catalog and the certificates, then exit")
            .action(ArgAction::SetTrue);
        let print = Arg::new("print-config")
            .long("print-config")
            .help("Print the effective configuration as TOML, then exit")
            .action(ArgAction::SetTrue);
        let command = command.arg(config).arg(check).arg(print);
        SETTINGS
            .iter()
            .fold(command, |command, setting| command.arg(flag(setting)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ServeArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let mut args = Self::default();
        args.update_from_arg_matches(matches)?;
        Ok(args)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.config = matches.get_one::<PathBuf>("config").cloned();
        self.check_config = matches.get_flag("check-config");
        self.print_config = matches.get_flag("print-config");
        for setting in SETTINGS {
            if let Some(value) = matches.get_one::<String>(setting.name) {
                self.given.insert(setting.name, value.clone());
            }
        }
        Ok(())
    }
}
