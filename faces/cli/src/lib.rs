//! The parts of the command `quinion` that its own tests look into.
//!
//! The command is a program and not a library: no promise is made about anything here, and nothing but `faces/cli` and
//! `bench` may name it. What is in it is [`run`], whose [`Session`](run::Session) the tests start with an owner of
//! their own, to see that programs print the same with a cache and without, and what `run` shares with the other verbs
//! and with the benchmark. [`top`] draws by the parts of `run --live`.

pub mod elf;
pub mod output;
pub mod report;
pub mod run;
pub mod size;
pub mod sys;
pub mod top;

/// The compiler that built this, as it names itself.
pub const COMPILER: &str = env!("QUINION_COMPILER");
/// The commit that this was built of; empty if that was not known.
pub const COMMIT: &str = env!("QUINION_COMMIT");
