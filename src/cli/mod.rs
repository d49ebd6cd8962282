//! The command line: definitions and the commands behind them.
