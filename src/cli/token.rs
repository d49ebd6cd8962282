//! `token`: a signed token for a client.

use std::io::Write;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::json;

use super::exit::{output_error, CommandError, Exit};
use crate::auth::{mint, MintError, MintRequest, SigningKey};
use crate::ids::TenantId;

#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    # Everything a data client may do in tenant t1, for an hour\n  \
    felix-uring token --tenant t1 --key-file pki/k1.pem\n\n  \
    # Only to write one stream, for ten minutes\n  \
    felix-uring token --tenant t1 --key-file pki/k1.pem --ttl 10m \\\n      \
        --perm stream.publish:stream:t1/default/events\n\n\
    A permission is ACTION:PATTERN; '*' in a pattern stands for anything, '/' too. The token goes\n\
    to standard output. Brokers accept it when the public half of the key is in their catalog.")]
pub struct TokenArgs {
    /// Tenant the token is for
    #[arg(long, value_name = "TENANT", value_parser = parse_tenant)]
    tenant: String,
    /// Ed25519 private key, PKCS #8 in PEM
    #[arg(long, value_name = "FILE")]
    key_file: PathBuf,
    /// Key id to name in the token
    #[arg(long, default_value = "k1", value_name = "KID", value_parser = not_empty)]
    kid: String,
    /// A permission; may be repeated. Without any: publish, subscribe, read and write in the tenant
    #[arg(long = "perm", value_name = "ACTION:PATTERN")]
    perms: Vec<String>,
    /// How long the token is valid: a number and s, m, h or d
    #[arg(long, default_value = "1h", value_name = "TIME", value_parser = parse_ttl_s)]
    ttl: u64,
    /// Who the token says the client is
    #[arg(long, default_value = "felix-uring", value_name = "NAME", value_parser = not_empty)]
    sub: String,
    /// Print one JSON object with the token and its claims
    #[arg(long)]
    json: bool,
}

/// Mints the token and prints it.
pub fn run(args: &TokenArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    let pem = std::fs::read_to_string(&args.key_file)
        .map_err(|e| CommandError::usage(format!("{}: {e}", args.key_file.display())))?;
    let key = SigningKey::from_pem(&pem)
        .map_err(|e| CommandError::usage(format!("{}: {e}", args.key_file.display())))?;
    let iat = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_err(|_| CommandError::failed("the clock of this machine is before 1970"))?
        .as_secs();
    let request = MintRequest {
        tenant: args.tenant.clone(),
        sub: args.sub.clone(),
        iat,
        exp: iat + args.ttl,
        nbf: None,
        kid: Some(args.kid.clone()),
        perms: if args.perms.is_empty() {
            data_permissions(&args.tenant)
        } else {
            args.perms.clone()
        },
    };
    let token = mint(&request, &key).map_err(|error| match error {
        MintError::BadPermission { .. } | MintError::BadKey => CommandError::usage(error),
        MintError::NoRandom => CommandError::failed(error),
    })?;
    let line = if args.json {
        json!({
            "token": token, "tenant": request.tenant, "sub": request.sub, "kid": args.kid,
            "perms": request.perms, "iat": request.iat, "exp": request.exp,
        })
        .to_string()
    } else {
        token
    };
    writeln!(out, "{line}").map_err(output_error)?;
    Ok(Exit::Done)
}

/// Everything a client may do with a tenant's streams and caches.
fn data_permissions(tenant: &str) -> Vec<String> {
    [
        ("stream.publish", "stream"),
        ("stream.subscribe", "stream"),
        ("group.manage", "stream"),
        ("cache.read", "cache"),
        ("cache.write", "cache"),
    ]
    .map(|(action, kind)| format!("{action}:{kind}:{tenant}/*/*"))
    .to_vec()
}

/// No broker has a tenant of another form: a token for one is refused everywhere.
fn parse_tenant(text: &str) -> Result<String, String> {
    match TenantId::new(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(why) => Err(format!("{why}; name a tenant of the catalog")),
    }
}

fn not_empty(text: &str) -> Result<String, String> {
    match text.trim().is_empty() {
        true => Err("must not be empty".to_owned()),
        false => Ok(text.to_owned()),
    }
}

fn parse_ttl_s(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit_s = match &text[digits.len()..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        other => return Err(format!("unknown unit {other:?}; use s, m, h or d")),
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(unit_s))
        .filter(|s| (1..=10 * 365 * 86_400).contains(s))
        .ok_or_else(|| "between 1s and 3650d, for example 15m".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_not_empty() {
        assert_eq!(parse_tenant("t1"), Ok("t1".to_owned()));
        assert!(parse_tenant("")
            .expect_err("empty")
            .contains("name a tenant"));
        for bad in ["", "  "] {
            assert_eq!(not_empty(bad), Err("must not be empty".to_owned()));
        }
    }

    #[test]
    fn times_have_units_and_bounds() {
        assert_eq!(parse_ttl_s("90"), Ok(90));
        assert_eq!(parse_ttl_s("15m"), Ok(900));
        assert_eq!(parse_ttl_s("2d"), Ok(172_800));
        for bad in ["", "m", "0s", "-1s", "1w", "99999999d", "1.5h", "1é"] {
            assert!(parse_ttl_s(bad).is_err(), "{bad}");
        }
    }
}
