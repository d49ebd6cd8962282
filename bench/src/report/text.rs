//! The report of a run in words and columns.

use std::fmt::Write;

use super::model::RunReport;
use crate::meter::LatencySummary;

/// The whole report.
pub fn render(report: &RunReport) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = write_report(&mut out, report);
    out
}

fn write_report(out: &mut String, report: &RunReport) -> std::fmt::Result {
    let (w, r) = (&report.workload, &report.result);
    let loop_kind = match w.rate {
        Some(rate) => format!("open loop, {} records/s", count(rate)),
        None => "closed loop".into(),
    };
    writeln!(
        out,
        "{}: {} B x batch {}, {} connections x {} outstanding, {} shards, {loop_kind}, {} x {} s",
        w.mode,
        w.payload_bytes,
        w.batch,
        w.connections,
        w.in_flight,
        w.shards,
        w.rounds,
        w.duration_s
    )?;
    writeln!(out)?;
    writeln!(
        out,
        "throughput    {} records/s   {:.1} MB/s   (rounds {} to {} records/s)",
        count(r.records_per_s),
        r.mb_per_s,
        count(r.records_per_s_spread.min),
        count(r.records_per_s_spread.max),
    )?;
    if let Some(offered) = r.offered_per_s {
        writeln!(out, "offered       {} records/s", count(offered))?;
        if r.unsent > 0 {
            writeln!(
                out,
                "not sent      {} records fell due and were never sent: the brokers did not keep up",
                count(r.unsent as f64)
            )?;
        }
        if !r.schedule_kept {
            writeln!(
                out,
                "SCHEDULE      this tool sent {} batches over 1 ms late by itself (at most {}); \
                 latencies include that",
                r.self_late,
                micros(r.self_late_max_us)
            )?;
        }
    }
    writeln!(out, "latency       {}", percentiles(&r.latency_us))?;
    writeln!(
        out,
        "outcomes      {} records acknowledged, {} failed, {} unknown, {} sent again after a refusal",
        count(r.records as f64),
        r.failed,
        r.unknown,
        r.retried
    )?;
    for (reason, times) in &r.reasons {
        writeln!(out, "              {times} x {reason}")?;
    }
    if r.per_shard.len() > 1 {
        let list: Vec<String> = r.per_shard.iter().map(u64::to_string).collect();
        writeln!(out, "per shard     {}", list.join(" "))?;
    }
    write_brokers(out, report)?;
    write_limits(out, report)?;
    write_verify(out, report)
}

fn write_brokers(out: &mut String, report: &RunReport) -> std::fmt::Result {
    if report.brokers.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    writeln!(
        out,
        "{:<10} {:<8} {:>8} {:>11} {:>9} {:>9} {:>10} {:>10} {:>9}",
        "broker",
        "role",
        "CPU s",
        "s/M records",
        "s/GB",
        "RSS MiB",
        "commits",
        "MB to log",
        "records/c"
    )?;
    for b in &report.brokers {
        writeln!(
            out,
            "{:<10} {:<8} {:>8.2} {:>11.3} {:>9.3} {:>9.1} {:>10} {:>10.1} {:>9.1}",
            b.node_id,
            b.role,
            b.cpu_s,
            b.cpu_s_per_million_records,
            b.cpu_s_per_gb,
            b.max_rss_bytes as f64 / f64::from(1 << 20),
            b.fsyncs,
            b.appended_bytes as f64 / 1e6,
            b.commit_group_records_mean
        )?;
    }
    writeln!(
        out,
        "{:<10} {:<8} {:>8.2}",
        "client", "load", report.result.client_cpu_s
    )
}

fn write_limits(out: &mut String, report: &RunReport) -> std::fmt::Result {
    let l = &report.limits;
    if l.bound_mb_per_s.is_none() && l.relay_mb_per_s.is_none() {
        return Ok(());
    }
    writeln!(out)?;
    if let Some(relay) = &l.relay_mb_per_s {
        writeln!(
            out,
            "relay probe   {:.1} MB/s ({:.1} to {:.1})",
            relay.median, relay.min, relay.max
        )?;
    }
    if let Some(latency) = &l.relay_latency_us {
        writeln!(out, "              {}", percentiles(latency))?;
    }
    if let (Some(ratio), Some(spread)) = (l.ratio, &l.ratio_spread) {
        writeln!(
            out,
            "ratio         {ratio:.2} of the relay probe ({:.2} to {:.2})",
            spread.min, spread.max
        )?;
    }
    if let (Some(disk), Some(bytes)) = (l.disk_append_mb_per_s, l.disk_write_bytes) {
        writeln!(
            out,
            "disk          {disk:.0} MB/s in durable writes of {} KiB",
            bytes / 1024
        )?;
    }
    if let Some(cpu) = l.quic_cpu_s_per_gb {
        writeln!(
            out,
            "QUIC          {cpu:.2} CPU s/GB for both ends of one bare hop"
        )?;
    }
    if let (Some(bound), Some(ratio)) = (l.bound_mb_per_s, l.bound_ratio) {
        writeln!(
            out,
            "bound         {bound:.0} MB/s; the run reached {ratio:.2} of it"
        )?;
    }
    if let Some(one) = &l.one_outstanding {
        writeln!(
            out,
            "one alone     p50 {}, {:.2} ({:.2} to {:.2}) of {} parked echoes of {} and one durable write of {}",
            micros(one.p50_us.median),
            one.ratio.median,
            one.ratio.min,
            one.ratio.max,
            one.hops,
            micros(one.echo_p50_us.median),
            micros(one.write_p50_us.median),
        )?;
    }
    Ok(())
}

fn write_verify(out: &mut String, report: &RunReport) -> std::fmt::Result {
    let v = &report.verify;
    writeln!(out)?;
    writeln!(
        out,
        "verification  {} records checked: {} missing, {} duplicated, {} reordered, {} corrupt",
        v.checked, v.missing, v.duplicated, v.reordered, v.corrupt
    )?;
    if let Some(copies) = &report.copies {
        writeln!(
            out,
            "              {} copies compared with their leader's log, {} records: {} unequal",
            copies.copies, copies.records, copies.unequal
        )?;
        for finding in &copies.findings {
            writeln!(out, "              {finding}")?;
        }
    }
    if v.refused_present + v.misplaced > 0 {
        writeln!(
            out,
            "              {} refused and present, {} shards with a wrong offset answered",
            v.refused_present, v.misplaced
        )?;
    }
    if v.unknown_present > 0 {
        writeln!(
            out,
            "              {} of unknown outcome are there",
            v.unknown_present
        )?;
    }
    for finding in &v.findings {
        writeln!(out, "              {finding}")?;
    }
    Ok(())
}

/// `p50 1.2 ms  p90 ...`
pub fn percentiles(l: &LatencySummary) -> String {
    format!(
        "p50 {}  p90 {}  p99 {}  p99.9 {}  p99.99 {}  max {}",
        micros(l.p50),
        micros(l.p90),
        micros(l.p99),
        micros(l.p999),
        micros(l.p9999),
        micros(l.max)
    )
}

/// A time with a unit that suits it.
pub fn micros(us: f64) -> String {
    match us {
        us if us < 1_000.0 => format!("{us:.0} us"),
        us if us < 1e6 => format!("{:.2} ms", us / 1e3),
        us => format!("{:.2} s", us / 1e6),
    }
}

/// A whole number with its thousands apart.
pub fn count(n: f64) -> String {
    let digits = format!("{:.0}", n.max(0.0));
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(count(1_234_567.4), "1,234,567");
        assert_eq!(count(999.0), "999");
        assert_eq!(micros(12.4), "12 us");
        assert_eq!(micros(1_250.0), "1.25 ms");
        assert_eq!(micros(2e6), "2.00 s");
    }

    #[test]
    fn what_went_wrong_is_said() {
        let mut report = RunReport::default();
        report.workload.rate = Some(1000.0);
        report.result.offered_per_s = Some(1000.0);
        report.result.unsent = 5;
        report.result.self_late = 3;
        report.verify.missing = 2;
        let text = render(&report);
        for part in ["5 records fell due", "SCHEDULE", "2 missing"] {
            assert!(text.contains(part), "{part:?} not in {text}");
        }
    }
}
