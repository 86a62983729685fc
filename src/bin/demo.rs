//! The demo program; all of it is in `tonic_failover::demo`.

fn main() -> std::process::ExitCode {
    tonic_failover::demo::main()
}
