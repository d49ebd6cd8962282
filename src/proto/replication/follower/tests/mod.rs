//! The follower over a model of its log, against the tables, the worked examples and the scenarios.

mod scenarios;
mod sequences;
mod support;
mod table;
mod worked;
