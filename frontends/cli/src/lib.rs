//! Parts of the command `quinion` that the benchmark uses as well: [`output`], [`sys`], and [`top`], whose panel tests
//! draw.
//!
//! The command is a program and not a library: no promise is made about anything here, and nothing but `frontends/cli`
//! and `bench` may name it. Programs are run on the cache by `quinion-run`, VMs are restored by `quinion-vm`, and files
//! are read by `quinion`: the command passes its options to them, and prints their reports.

pub mod output;
pub mod sys;
pub mod top;
