//! The report as text and as JSON.

use std::fmt::Write;

use super::{Check, PreflightReport, Status};

impl PreflightReport {
    /// All checks for a person: one line each, with cause and remedy under those not as needed.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for check in &self.checks {
            write_check(&mut text, check);
        }
        let failed = self.with_status(Status::Fail).count();
        let warned = self.with_status(Status::Warn).count();
        let verdict = if self.ok {
            "this host can run felix-uring"
        } else {
            HEADLINE
        };
        let counts = format!("{failed} failed, {warned} warnings");
        put(&mut text, format_args!("{verdict} ({counts})\n"));
        text
    }

    /// All checks for a program: one JSON object, `{"ok": bool, "checks": [...]}`.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings and booleans always serialize")
    }

    /// One message with everything that keeps the broker from running; `None` when nothing does.
    pub fn failure_message(&self) -> Option<String> {
        if self.ok {
            return None;
        }
        let mut text = format!("{HEADLINE}:\n");
        for check in self.with_status(Status::Fail) {
            write_check(&mut text, check);
        }
        Some(text)
    }
}

const HEADLINE: &str = "this host cannot run felix-uring";

fn write_check(text: &mut String, check: &Check) {
    let status = match check.status {
        Status::Ok => "ok  ",
        Status::Warn => "WARN",
        Status::Fail => "FAIL",
    };
    let (name, current, needed) = (check.name, &check.current, &check.needed);
    put(
        text,
        format_args!("{status} {name}: {current} (needed: {needed})\n"),
    );
    let remedy = &check.remedy;
    let details = [
        ("cause", &check.cause),
        ("shell", &remedy.shell),
        ("unit", &remedy.unit),
        ("container", &remedy.container),
    ];
    for (label, detail) in details.iter().filter(|(_, detail)| !detail.is_empty()) {
        put(text, format_args!("       {label:<9} {detail}\n"));
    }
}

fn put(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments)
        .expect("writing to a String cannot fail");
}
