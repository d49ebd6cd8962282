//! The broker and its tools; everything is in the library.

fn main() -> std::process::ExitCode {
    felix_uring::cli::run(std::env::args_os())
}
