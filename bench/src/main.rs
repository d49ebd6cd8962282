//! The load tool; everything is in the library.

fn main() -> std::process::ExitCode {
    felix_bench::cli::run(std::env::args_os().collect())
}
